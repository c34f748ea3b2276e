"""What upstream's SuperOffload gets wrong, ours right; each case records what the peer does today (0.19.8).

On processors: its CUDA check and stream synchronization are stubbed, and its worker is the original function on a
thread instead of a process, which changes nothing in what it computes.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.support.deepspeed.ranks import Ranks
from tests.support.deepspeed.scenarios import INF, UNUSED, Scenario, distance, gradients_of, reference
from tests.support.deepspeed.training import OURS, config, end, make_engine, masters

FOUND = version("deepspeed") if find_spec("deepspeed") is not None else "none"
pytestmark = [
    pytest.mark.in_turn("upstream mistakes"),
    pytest.mark.usefixtures("kernel"),
    pytest.mark.skipif(
        FOUND != "0.19.8",
        reason=f"needs DeepSpeed 0.19.8, whose faults it records: pip install deepspeed==0.19.8; here: {FOUND}",
    ),
]
STEPS = 6
GAPS: dict[int, tuple[int, ...]] = {2: (UNUSED,), 3: (UNUSED,)}
Outcome = dict[str, Any]


def gradients(micros: int = 1, skips: dict[int, tuple[int, ...]] | None = None) -> list[list[dict[int, Tensor]]]:
    skips = skips or {}
    return [[gradients_of(step, micro, skips.get(step, ())) for micro in range(micros)] for step in range(STEPS)]


@dataclass(frozen=True)
class Case:
    """``expected``: the reference. ``theirs``: of upstream's outcome, and how far that is from the reference."""

    theirs: Callable[[Outcome, float], bool]
    expected: Callable[[], dict[str, Tensor]] = lambda: reference(gradients(), 1, 0.0)
    ours_is_near: bool = True  # or it follows a setting that the reference, like upstream, ignores
    tolerance: float = 1e-4
    config: dict[str, Any] = field(default_factory=dict)
    micros: int = 1
    skips: dict[int, tuple[int, ...]] = field(default_factory=dict)
    poison: dict[int, tuple[int, int, float]] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)  # of param groups, before step 3


def ignores_it(theirs: Outcome, away: float) -> bool:
    return away < 1e-4


CASES = {
    "nothing happens": Case(  # so that the others do not see the stubs' doing
        lambda theirs, away: away < 1e-4 and theirs["submitted"] == STEPS and not theirs["saves moments"]
    ),
    "one infinite gradient": Case(
        lambda theirs, away: (
            math.isnan(away) and math.isfinite(theirs["losses"][4]) and math.isnan(theirs["losses"][5])
        ),
        lambda: reference(gradients(), 1, 0.0, skip={3}),
        poison={3: INF[3]},
    ),
    "two backwards before a step": Case(
        lambda theirs, away: away > 1e-2 and theirs["submitted"] == 2 * STEPS,
        lambda: reference(gradients(2), 1, 0.0),
        micros=2,
    ),
    "an unused parameter": Case(  # the whole sub-group that it belongs to is not stepped
        lambda theirs, away: away > 1e-2 and theirs["submitted"] == STEPS - 2,
        lambda: reference(gradients(1, GAPS), 1, 0.0),
        skips=GAPS,
    ),
    "unmanaged accumulation": Case(
        lambda theirs, away: theirs["submitted"] == 0 and theirs["moved"] == 0.0,
        lambda: reference(gradients(2), 2, 0.0),
        config={"accumulation": 2, "managed_gradient_accumulation": False},
        micros=2,
    ),
    "loss scale": Case(  # gradients are still scaled, which shows where eps counts
        lambda theirs, away: away > 5e-2,
        lambda: reference(gradients(), 1, 0.0, eps=1e-2),
        tolerance=1e-2,  # gradients were rounded to fp16
        config={"precision": "fp16 128", "optimizer": {"eps": 1e-2}},
    ),
    "hyper-parameters that change": Case(
        ignores_it, ours_is_near=False, changes={"weight_decay": 0.9, "betas": (0.5, 0.6), "eps": 1e-3}
    ),
    "plain Adam": Case(
        ignores_it,
        ours_is_near=False,
        config={"kind": "Adam", "optimizer": {"torch_adam": False, "adam_w_mode": False}},
    ),
    "no bias correction": Case(
        ignores_it, ours_is_near=False, config={"optimizer": {"torch_adam": False, "bias_correction": False}}
    ),
}


def on_a_thread(original: type, worker: Any) -> type:
    class ThreadOptimizer(original):
        def __init__(self, optimizer_config: Any, max_grad_numel: int, **_: Any) -> None:
            self.max_grad_numel = max_grad_numel
            self.param_queue, self.result_queue = queue.SimpleQueue[Any](), queue.SimpleQueue[Any]()
            arguments = (self.param_queue, self.result_queue, optimizer_config, max_grad_numel, False)
            self.cpuadam_process = threading.Thread(target=worker, args=arguments, daemon=True)
            self.cpuadam_process.start()
            self.submitted = 0

        def async_step(self, *args: Any, **kwargs: Any) -> None:
            self.submitted += 1
            super().async_step(*args, **kwargs)

        def close(self) -> None:
            self.param_queue.put(None)
            self.cpuadam_process.join(20)

    return ThreadOptimizer


@contextmanager
def upstreams_engine(**settings: Any) -> Iterator[Any]:
    """An engine with upstream's optimizer, while ours is disabled; ended with the context."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.superoffload import superoffload_stage3 as upstream
    from deepspeed.runtime.superoffload import superoffload_utils as utils

    import superoffload.integrations.deepspeed as ours

    ours.disable()
    configuration, model = config({"device": "cpu", "super_offload": True}, **settings), Scenario().model()
    configuration.pop("superoffload", None)
    on_thread = on_a_thread(utils.SuperOffloadCPUOptimizer, utils.superoffload_optimizer_worker)
    accelerator = mock.Mock(wraps=get_accelerator(), current_stream=mock.Mock())
    with mock.patch.multiple(
        upstream,
        SuperOffloadCPUOptimizer=on_thread,
        get_accelerator=lambda: accelerator,
        _validate_superoffload_accelerator=lambda: None,
    ):
        made, *_ = deepspeed.initialize(model=model, config=configuration, model_parameters=model.parameters())
        try:
            yield made
        finally:
            made.optimizer.superoffload_cpu_optimizer.close()
            made.destroy()
            made._config.zero_config.offload_optimizer.super_offload = False  # enable() would refuse to meet it again


def run(name: str) -> tuple[Outcome, Outcome]:
    """Ours and upstream's, on the same recorded gradients."""
    case = CASES[name]
    settings = {"precision": "fp32", **case.config}
    engine = make_engine(config(OURS, options={"speculation": "always"}, **settings), Scenario().model())
    ours = _train(engine, case)
    end(engine)
    with upstreams_engine(**settings) as engine:
        theirs = _train(engine, case)
        entries = engine.optimizer.state_dict()["optimizer_state_dict"]["state"].values()
        theirs["submitted"] = engine.optimizer.superoffload_cpu_optimizer.submitted
        theirs["saves moments"] = any(bool(torch.as_tensor(entry["exp_avg"]).any()) for entry in entries)
    return ours, theirs


def _train(engine: Any, case: Case) -> Outcome:
    before, losses = masters(engine), []
    for step in range(STEPS):
        rank, dot, value = case.poison.get(step, (-1, 0, 0.0))
        poison = {dot: value} if rank == torch.distributed.get_rank() else None
        for micro in range(case.micros):
            loss = engine(step, micro, case.skips.get(step, ()), poison)
            engine.backward(loss)
        if step == 3:
            engine.optimizer.optimizer.param_groups[0].update(case.changes)
        engine.step()
        losses.append(float(loss.detach()))
    found = masters(engine)
    return {"masters": found, "losses": losses, "moved": distance(before, found)}


@pytest.mark.parametrize("name", CASES)
def test_ours_is_right_and_upstream_as_recorded(name: str, two_ranks: Ranks) -> None:
    case = CASES[name]
    ours, theirs = two_ranks.run(run, name)[0]
    expected = case.expected()
    assert (distance(expected, ours["masters"]) < case.tolerance) == case.ours_is_near
    assert case.theirs(theirs, distance(expected, theirs["masters"])), "upstream has changed"


def submitted_before_step(clip: float) -> int:
    scenario = Scenario()
    with upstreams_engine(precision="fp32", clip=clip) as engine:
        engine.backward(scenario.loss_of(engine, 0, 0))
        found = int(engine.optimizer.superoffload_cpu_optimizer.submitted)
        engine.step()
    return found


def test_speculation_with_clipping(two_ranks: Ranks) -> None:
    """Upstream steps after the verdict where clipping is configured, though nothing is ever clipped here."""
    assert two_ranks.run(submitted_before_step, 1e6)[0] == 0
    assert two_ranks.run(submitted_before_step, 0.0)[0] == 1


def roll_back() -> tuple[float, bool]:
    """After twenty steps, one more and its rollback: the part of the weights with other bits; after a spike and its
    rollback, whether a variance is negative."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    torch.manual_seed(1)
    param = torch.nn.Parameter(torch.randn(1 << 16) * 0.05)
    optimizer = DeepSpeedCPUAdam([param], lr=1e-3, weight_decay=0.1)
    for _ in range(20):
        param.grad = torch.randn_like(param) * 0.01
        optimizer.step_subgroup(0)
    before = param.detach().clone()
    param.grad = torch.randn_like(param) * 0.01
    optimizer.step_subgroup(0)
    optimizer.rollback_subgroup(0)
    changed = float((param.detach() != before).float().mean())
    param.grad = torch.randn_like(param) * 1e3
    optimizer.step_subgroup(0)
    optimizer.rollback_subgroup(0)
    state = next(iter(optimizer.state.values()))
    return changed, bool((state["exp_avg_sq"] < 0).any())


def test_rollback(two_ranks: Ranks) -> None:
    """Ours restores every bit: tests/kernels/test_journal.py."""
    changed, negative = two_ranks.run(roll_back)[0]
    assert 0.1 < changed < 0.7, "upstream's rollback is exact now"
    assert negative
