"""DeepSpeed features next to ours, on a model that learns: against stock, and speculating against waiting."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superoffload.errors import StateError
from tests.support.deepspeed.ranks import Ranks
from tests.support.deepspeed.scenarios import WAYS
from tests.support.deepspeed.training import Small, batch, config, end, make_engine, run_steps
from tests.support.turns import in_turn

STEPS = 6


class Experts(nn.Module):
    """Uses one expert per forward pass; the others get no gradient there."""

    def __init__(self, width: int, count: int = 3) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        chosen: Tensor = self.experts[self.calls % len(self.experts)](x)
        return x + chosen


class WithExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 32)
        self.moe = Experts(32)
        self.head = nn.Linear(32, 61)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.moe(self.embed(tokens))).float()
        return nn.functional.cross_entropy(logits.view(-1, 61), targets.view(-1))


class Reentrant(Small):
    def forward(self, tokens: Tensor, targets: Tensor, use_extra: bool = True) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)
        logits = self.head(x + self.extra(x)).float()
        return nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def _leaf(configuration: dict[str, Any]) -> nn.Module:
    from deepspeed.utils import set_z3_leaf_modules

    model = WithExperts()
    set_z3_leaf_modules(model, [Experts])
    return model


def _zero_init(configuration: dict[str, Any]) -> nn.Module:
    import deepspeed

    with deepspeed.zero.Init(config_dict_or_path=configuration):
        return Small()


MODELS: dict[str, Callable[[dict[str, Any]], nn.Module]] = {
    "reentrant checkpointing": lambda _: Reentrant(),
    "leaf modules": _leaf,
    "zero.Init": _zero_init,
    "compile": lambda _: Small(depth=1),
}


def train(name: str, way: str) -> dict[str, Any]:
    import superoffload.integrations.deepspeed as ours

    offload, options = WAYS[way]
    configuration = config(offload, options=options, clip=2.0, precision="fp32")
    torch.manual_seed(1)
    ours.enable()  # before zero.Init, which reads the config too
    engine = make_engine(configuration, MODELS[name](configuration))
    if name == "compile" and way != "stock":  # so that stock is eager mode too
        engine.compile()
    result = run_steps(engine, range(STEPS))
    if way != "stock":
        result["digests"] = engine.optimizer.state_digests()
        result["stats"] = engine.optimizer.stats()
    end(engine)
    return result


@pytest.mark.parametrize("name", in_turn(MODELS, every_time=[name for name in MODELS if name != "compile"]))
def test_features(name: str, two_ranks: Ranks) -> None:
    ways = ["stock", "match", "match, waiting"] + (["ours", "ours, later"] if name == "reentrant checkpointing" else [])
    found = {way: two_ranks.run(train, name, way, timeout=200) for way in ways}
    for rank in range(2):
        stock, ours = found["stock"][rank], found["match"][rank]
        # fp32 throughout: the two differ by rounding, which a few steps cannot blow up to a thousandth
        assert ours["losses"] == pytest.approx(stock["losses"], rel=1e-3)
        assert ours["norms"] == pytest.approx(stock["norms"], rel=1e-3)
        assert ours["applied"] == stock["applied"]
        assert ours["losses"][-1] < ours["losses"][0]
        assert ours["stats"]["buckets_speculated"] > 0
        assert ours["digests"] == found["match, waiting"][rank]["digests"]
        if "ours" in found:
            assert found["ours"][rank]["digests"] == found["ours, later"][rank]["digests"]


def _engine(seed: int = 1, clip: float = 0.0, **options: Any) -> Any:
    torch.manual_seed(seed)
    return make_engine(config(options=options, clip=clip), Small())


def two_engines(**options: Any) -> tuple[list[Any], list[Any]]:
    """Digests of actor and critic, their steps interleaved, and of each alone."""
    kinds = ((1, 2.0), (2, 0.0))
    engines = [_engine(seed, clip, **options) for seed, clip in kinds]
    for step in range(4):
        losses = [engine(*batch(step)) for engine in engines]
        for engine, loss in zip(engines, losses, strict=True):
            engine.backward(loss)
        for engine in reversed(engines):
            engine.step()
    together = [engine.optimizer.state_digests() for engine in engines]
    for engine in engines:
        end(engine)
    alone = []
    for seed, clip in kinds:
        engine = _engine(seed, clip, **options)
        run_steps(engine, range(4))
        alone.append(engine.optimizer.state_digests())
        end(engine)
    return together, alone


def test_two_engines_in_one_process(two_ranks: Ranks) -> None:
    for together, alone in two_ranks.run(two_engines, speculation="always", delivery="on_demand"):
        assert together == alone
        assert together[0] != together[1]


def processors(threads: int | None) -> tuple[list[int], int, int]:
    """Of this rank's worker threads, how many threads an engine then has, how many processors there are."""
    import torch.distributed as dist

    from superoffload.integrations.deepspeed.partitions import cpus_of_this_rank

    engine = _engine(**({} if threads is None else {"threads": threads}))
    found, _ = cpus_of_this_rank(threads, [torch.zeros(1)], dist.group.WORLD, None)
    running = engine.optimizer.parts.driver.engine.pool.threads
    end(engine)
    return found, running, len(os.sched_getaffinity(0))


@pytest.mark.parametrize("threads", [None, 3])
def test_ranks_share_the_processors(threads: int | None, two_ranks: Ranks) -> None:
    (one, running, there), (other, *_) = two_ranks.run(processors, threads)
    assert running == len(one) == (threads or running)
    if there >= 2:
        bound, others = set(one) - {-1}, set(other) - {-1}  # -1: more threads than processors
        assert bound and others and not bound & others


def _children() -> set[str]:
    """Of all threads that this process has; one that ends meanwhile has none."""
    found: set[str] = set()
    for task in os.listdir("/proc/self/task"):
        with suppress(FileNotFoundError):
            found |= set(Path(f"/proc/self/task/{task}/children").read_text().split())
    return found


def _threads() -> int:
    """Worker threads of all engines here."""
    found = 0
    for task in os.listdir("/proc/self/task"):
        with suppress(FileNotFoundError):
            found += Path(f"/proc/self/task/{task}/comm").read_text().startswith("superoffload")
    return found


def memory_of(optimizer: Any) -> dict[str, Any]:
    """Weak references to what takes host memory."""
    master = optimizer.fp32_partitioned_groups_flat[0]
    tensors = {
        "gradients": optimizer.grad_partitions_flat_buffer,
        "master": master,
        **{name: optimizer.optimizer.state[master][name] for name in ("exp_avg", "exp_avg_sq")},
        **{f"shadow {i}": bucket.shadow for i, bucket in enumerate(optimizer.parts.driver.engine.buckets)},
    }
    return {name: weakref.ref(tensor) for name, tensor in tensors.items()}


def left_behind() -> list[str]:
    """What stock or upstream make, or what is still there of an engine that was destroyed, by name."""
    before = _children()
    left: list[str] = []
    engine = _engine(clip=1.0, speculation="always")
    optimizer = engine.optimizer

    def look(*_: Any) -> None:
        left.extend("fp32 gradient" for flat in optimizer.fp32_partitioned_groups_flat if flat.grad is not None)

    run_steps(engine, range(2), before_step=look)
    left += ["a process"] if _children() - before else []
    held = memory_of(optimizer)
    assert len(held) > 5 and _threads() > 0
    optimizer.close()  # twice does no harm
    end(engine)
    gc.collect()
    left += [name for name in held if held[name]() is not None]
    until = time.monotonic() + 60  # the kernel takes an ended thread from its list after join() returns
    while _threads() and time.monotonic() < until:
        time.sleep(0.001)
    left += ["threads"] if _threads() else []
    if not all(param.ds_tensor.numel() for param in engine.module.parameters()):
        left.append("no parameters")
    with pytest.raises(StateError, match="was destroyed"):
        optimizer.stats()
    return left


def test_destroyed_engines_leave_nothing_behind(two_ranks: Ranks) -> None:
    """Although DeepSpeed's hooks keep the optimizer itself; its memory is pinned where there is an accelerator."""
    assert two_ranks.run(left_behind) == [[], []]
