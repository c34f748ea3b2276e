"""What upstream's SuperOffload gets wrong, ours right; each case records what the peer does today (0.19.8)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.deepspeed import upstream
from tests.support.deepspeed.ranks import Ranks
from tests.support.deepspeed.recorded_reference import UNUSED, gradients_of, reference
from tests.support.deepspeed.scenarios import INF, Scenario, distance
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
UPSTREAM = {"device": "cpu", "super_offload": True}
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


def run(name: str) -> tuple[Outcome, Outcome]:
    """Ours and upstream's, on the same recorded gradients."""
    case = CASES[name]
    settings = {"precision": "fp32", **case.config}
    engine = make_engine(config(OURS, options={"speculation": "always"}, **settings), Scenario().model())
    ours = _train(engine, case)
    end(engine)
    with upstream.engine(config(UPSTREAM, **settings), Scenario().model()) as engine:
        theirs = _train(engine, case)
        entries = engine.optimizer.state_dict()["optimizer_state_dict"]["state"].values()
        theirs["submitted"] = engine.optimizer.superoffload_cpu_optimizer.submitted
        theirs["saves moments"] = any(bool(torch.as_tensor(entry["exp_avg"]).any()) for entry in entries)
    return ours, theirs


def _train(engine: Any, case: Case) -> Outcome:
    before, losses = masters(engine), []
    for step in range(STEPS):
        poison = None
        if step in case.poison and case.poison[step][0] == torch.distributed.get_rank():
            poison = {case.poison[step][1]: case.poison[step][2]}
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
    with upstream.engine(config(UPSTREAM, precision="fp32", clip=clip), scenario.model()) as engine:
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
