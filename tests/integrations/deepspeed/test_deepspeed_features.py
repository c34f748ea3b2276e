"""DeepSpeed features next to ours, on a model that learns: against stock, and speculating against waiting."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from superoffload.errors import StateError
from tests.support.deepspeed.ranks import Ranks
from tests.support.deepspeed.scenarios import CLIP_SOME, WAYS, Scenario
from tests.support.deepspeed.training import OURS, Small, batch, config, end, make_engine, run_steps

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


SLOW = pytest.param("compile", marks=pytest.mark.in_turn)


@pytest.mark.parametrize("name", [SLOW if name == "compile" else name for name in MODELS])
def test_features(name: str, two_ranks: Ranks) -> None:
    ways = ["stock", "match", "match, waiting"]
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


def _engine(seed: int = 1, clip: float = 0.0, **options: Any) -> Any:
    torch.manual_seed(seed)
    return make_engine(config(options=options, clip=clip), Small())


def two_engines() -> None:
    """Actor and critic, their steps interleaved, and each alone."""
    kinds = ((1, 2.0), (2, 0.0))
    options = {"speculation": "always", "delivery": "on_demand"}
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
    for (seed, clip), expected in zip(kinds, together, strict=True):
        engine = _engine(seed, clip, **options)
        run_steps(engine, range(4))
        assert engine.optimizer.state_digests() == expected
        end(engine)


def test_two_engines_in_one_process(two_ranks: Ranks) -> None:
    two_ranks.run(two_engines)


def left_behind() -> None:
    """No fp32 gradient, as stock and upstream make; nothing of an engine that was destroyed."""
    engine = _engine(clip=1.0, speculation="always")
    optimizer = engine.optimizer

    def look(*_: Any) -> None:
        assert all(flat.grad is None for flat in optimizer.fp32_partitioned_groups_flat)

    run_steps(engine, range(2), before_step=look)
    master = optimizer.fp32_partitioned_groups_flat[0]
    state = optimizer.optimizer.state[master]
    held = [optimizer.grad_partitions_flat_buffer, master, state["exp_avg"], state["exp_avg_sq"]]
    held += [bucket.shadow for bucket in optimizer.parts.driver.engine.buckets]
    known = [weakref.ref(tensor) for tensor in held]
    assert len(known) > 5
    del master, state, held
    optimizer.close()  # twice does no harm
    end(engine)
    gc.collect()
    assert [number for number, tensor in enumerate(known) if tensor() is not None] == []
    assert all(param.ds_tensor.numel() for param in engine.module.parameters())
    with pytest.raises(StateError, match="was destroyed"):
        optimizer.stats()


def test_destroyed_engines_leave_nothing_behind(two_ranks: Ranks) -> None:
    """Although DeepSpeed's hooks keep the optimizer itself; its memory is pinned where there is an accelerator."""
    two_ranks.run(left_behind)


def train_with_late_gradients(late: bool) -> dict[str, str]:
    """As on an accelerator: gradients are still being copied when those of the next backward come."""
    from deepspeed.accelerator import get_accelerator

    scenario = Scenario({"clip": CLIP_SOME}, micros=2, one_step_call=True)
    calls: Counter[int] = Counter()
    accelerator = mock.Mock(wraps=get_accelerator())  # only ours sees it
    accelerator.is_synchronized_device.return_value = not late
    accelerator.Event.side_effect = lambda: mock.Mock(query=lambda: False)  # before step() waits for the stream
    with (
        mock.patch("superoffload.integrations.deepspeed.stage3.gradients.get_accelerator", lambda: accelerator),
        mock.patch.object(Tensor, "record_stream", lambda tensor, stream: None),
    ):
        engine = scenario.engine(OURS, {"speculation": "always"})
        driver = engine.optimizer.parts.driver
        final = driver.final

        def counted(partition: Any, **kwargs: Any) -> None:
            calls[partition.key] += 1
            final(partition, **kwargs)

        driver.final = counted
        with mock.patch.object(engine.optimizer, "reduce_and_partition_stream", mock.Mock()):
            scenario.train(engine, range(3))
            digests: dict[str, str] = engine.optimizer.state_digests()
    end(engine)
    assert not late or set(calls.values()) == {3}, "a gradient was handed over while the next one was being copied"
    return digests


def test_only_the_last_gradient_is_final(two_ranks: Ranks) -> None:
    assert two_ranks.run(train_with_late_gradients, True) == two_ranks.run(train_with_late_gradients, False)
