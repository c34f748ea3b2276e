"""DeepSpeed features next to ours, on a model that learns: against stock, and speculating against waiting."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.compatibility import compat
from tests.support.deepspeed.ranks import Ranks
from tests.support.deepspeed.scenarios import WAYS
from tests.support.deepspeed.training import Small, batch, config, end, make_engine, plain, run_steps
from tests.support.turns import in_turn

STEPS = 8


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
    "checkpointing": lambda _: Small(checkpointing=True),
    "reentrant checkpointing": lambda _: Reentrant(),
    "leaf modules": _leaf,
    "zero.Init": _zero_init,
    "compile": lambda _: Small(),
}
EAGER_MODE = {"plain": lambda _: Small()}


def train(name: str, way: str) -> dict[str, Any]:
    offload, options = WAYS[way]
    configuration = config(offload, options=options, clip=2.0, precision="fp32")
    torch.manual_seed(1)

    import superoffload.integrations.deepspeed as ours

    ours.enable()  # before zero.Init, which reads the config too
    engine = make_engine(configuration, {**MODELS, **EAGER_MODE}[name](configuration))
    if name == "compile":
        engine.compile()
    result = run_steps(engine, range(STEPS), loss_of=plain)
    if way != "stock":
        result["digests"] = engine.optimizer.state_digests()
        result["stats"] = engine.optimizer.stats()
    end(engine)
    return result


@compat("torch.compile of the model: as eager, and speculative = synchronous to the bit", "deepspeed")
@compat("activation checkpointing", "deepspeed")
@pytest.mark.parametrize("name", in_turn(MODELS, every_time=[name for name in MODELS if name != "compile"]))
def test_features(name: str, two_ranks: Ranks) -> None:
    ways = ["stock", "match", "match, waiting"] + (["ours", "ours, later"] if name == "reentrant checkpointing" else [])
    found = {way: two_ranks.run(train, name, way, timeout=200) for way in ways}
    if name == "compile":
        found["eager mode"] = two_ranks.run(train, "plain", "match", timeout=200)
    for rank in range(2):
        stock, ours = found["stock"][rank], found["match"][rank]
        # fp32 throughout: the two differ by rounding, which eight steps cannot blow up to a thousandth
        assert ours["losses"] == pytest.approx(stock["losses"], rel=1e-3)
        assert ours["norms"] == pytest.approx(stock["norms"], rel=1e-3)
        assert ours["applied"] == stock["applied"]
        assert ours["losses"][-1] < ours["losses"][0]
        assert ours["stats"]["buckets_speculated"] > 0
        assert ours["digests"] == found["match, waiting"][rank]["digests"]
        if "ours" in found:
            assert found["ours"][rank]["digests"] == found["ours, later"][rank]["digests"]
        if name == "compile":
            assert ours["losses"] == pytest.approx(found["eager mode"][rank]["losses"], rel=1e-3)


def two_engines(options: dict[str, Any]) -> list[dict[str, str]]:
    """Actor and critic, their steps interleaved; then each alone."""
    digests = []
    for together in (True, False):
        if together:
            engines = [
                make_engine(config(options=options, clip=clip), _seeded(seed)) for seed, clip in ((1, 2), (2, 0))
            ]
            for step in range(4):
                losses = [engine(*batch(step)) for engine in engines]
                for engine, loss in zip(engines, losses, strict=True):
                    engine.backward(loss)
                for engine in reversed(engines):
                    engine.step()
            digests += [engine.optimizer.state_digests() for engine in engines]
            for engine in engines:
                end(engine)
        else:
            for seed, clip in ((1, 2), (2, 0)):
                engine = make_engine(config(options=options, clip=clip), _seeded(seed))
                run_steps(engine, range(4))
                digests.append(engine.optimizer.state_digests())
                end(engine)
    return digests


def _seeded(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Small()


@compat("several optimizers on one model", "deepspeed", note="as several engines in one process")
@pytest.mark.parametrize("delivery", ["eager", "on_demand"])
def test_two_engines_in_one_process(delivery: str, two_ranks: Ranks) -> None:
    for actor, critic, actor_alone, critic_alone in two_ranks.run(
        two_engines, {"speculation": "always", "delivery": delivery}
    ):
        assert actor == actor_alone
        assert critic == critic_alone
        assert actor != critic


def processors(threads: int | None) -> tuple[list[int], int, int]:
    """Of this rank's worker threads, how many threads an engine then has, how many processors there are."""
    import torch.distributed as dist

    from superoffload.integrations.deepspeed.partitions import cpus_of_this_rank

    engine = make_engine(config(options={} if threads is None else {"threads": threads}), _seeded(1))
    found, _ = cpus_of_this_rank(threads, [torch.zeros(1)], dist.group.WORLD, None)
    running = engine.optimizer.parts.driver.engine.pool.threads
    end(engine)
    return found, running, len(os.sched_getaffinity(0))


@pytest.mark.parametrize("threads", [None, 3])
def test_ranks_share_the_processors(threads: int | None, two_ranks: Ranks) -> None:
    (one, running, there), (other, *_) = two_ranks.run(processors, threads)
    assert running == len(one) == (len(one) if threads is None else threads)
    if there >= 2:
        bound, others = set(one) - {-1}, set(other) - {-1}  # -1: more threads than processors
        assert bound and others and not bound & others


def make_and_end(times: int) -> list[int]:
    """Threads of this process after each engine ended."""
    import gc

    model = _seeded(1)
    counts: list[int] = []
    for i in range(times):
        engine = make_engine(config(options={"speculation": "always"}), model)
        run_steps(engine, range(2))
        if i % 2:  # twice does no harm
            engine.optimizer.close()
        engine.destroy()
        del engine
        gc.collect()
        until = time.monotonic() + 60  # the kernel takes an ended thread from its list after join() returns
        while i > 1 and len(os.listdir("/proc/self/task")) > counts[1] and time.monotonic() < until:
            time.sleep(0.001)
        counts.append(len(os.listdir("/proc/self/task")))
    return counts


def test_engines_leave_no_threads(two_ranks: Ranks) -> None:
    for counts in two_ranks.run(make_and_end, 6):
        assert counts[-1] <= counts[1]


def kept_in_memory() -> list[str]:
    """Returns by name the host memory of an engine that is still held after ``destroy()``."""
    import gc
    import weakref

    engine = make_engine(config(options={"speculation": "always"}), _seeded(1))
    run_steps(engine, range(2))
    optimizer = engine.optimizer
    masters = optimizer.fp32_partitioned_groups_flat
    tensors = {
        "gradients": optimizer.grad_partitions_flat_buffer,
        "master": masters[0],
        **{name: optimizer.optimizer.state[masters[0]][name] for name in ("exp_avg", "exp_avg_sq")},
        **{f"shadow {i}": bucket.shadow for i, bucket in enumerate(optimizer.parts.driver.engine.buckets)},
    }
    held = {name: weakref.ref(tensor) for name, tensor in tensors.items()}
    assert len(held) > 5
    del tensors, masters
    end(engine)
    gc.collect()
    parameters = [param.ds_tensor.numel() for param in engine.module.parameters()]  # these stay
    return [name for name in held if held[name]() is not None] + ([] if all(parameters) else ["no parameters"])


def test_destroyed_engines_leave_no_state_in_memory(two_ranks: Ranks) -> None:
    """Although DeepSpeed's hooks keep the optimizer itself; that memory is pinned where there is an accelerator."""
    assert two_ranks.run(kept_in_memory) == [[], []]


def besides_the_step() -> tuple[bool, bool]:
    """fp32 gradients of sub-groups, which stock makes; processes, of which upstream has one per rank."""
    before = _children()
    engine = make_engine(config(options={"speculation": "always"}, clip=1.0), _seeded(1))
    flats, seen = engine.optimizer.fp32_partitioned_groups_flat, []
    run_steps(engine, range(2), before_step=lambda *_: seen.append(any(flat.grad is not None for flat in flats)))
    seen.append(any(flat.grad is not None for flat in flats))
    new = _children() - before
    end(engine)
    return any(seen), bool(new)


def _children() -> set[str]:
    """Of all threads that this process has; one that ends meanwhile has none."""
    found: set[str] = set()
    for task in os.listdir("/proc/self/task"):
        with suppress(FileNotFoundError):
            found |= set(Path(f"/proc/self/task/{task}/children").read_text().split())
    return found


def test_no_gradients_in_fp32_and_no_process(two_ranks: Ranks) -> None:
    assert two_ranks.run(besides_the_step) == [(False, False)] * 2
