"""What upstream's SuperOffload gets wrong, ours right; each test records what the peer does today (0.19.8)."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.deepspeed import upstream
from tests.support.deepspeed.ranks import Ranks
from tests.support.deepspeed.recorded_reference import NAME, UNUSED, gradients_of, reference
from tests.support.deepspeed.scenarios import INF, WAYS, Scenario, distance
from tests.support.deepspeed.training import config, end, make_engine, masters

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
SPECULATING = {"speculation": "always"}
Outcome = dict[str, Any]


def run(way: str, case: dict[str, Any]) -> Outcome:
    """Trains on recorded gradients. ``case``: config, skips, poison, micros, groups' changes at step 3."""
    settings = {"precision": "fp32", **case.get("config", {})}
    scenario = Scenario(poison=case.get("poison", {}))
    model = scenario.model()
    if way == "ours":
        offload, _ = WAYS["ours"]
        engine = make_engine(config(offload, options=SPECULATING, **settings), model)
        try:
            return _train(engine, scenario, case)
        finally:
            end(engine)
    with upstream.engine(config(UPSTREAM, **settings), model) as engine:
        return {
            **_train(engine, scenario, case),
            "submitted": engine.optimizer.superoffload_cpu_optimizer.submitted,
            "state": {
                name: bool(torch.as_tensor(value).any())
                for state in engine.optimizer.state_dict()["optimizer_state_dict"]["state"].values()
                for name, value in state.items()
                if name.startswith("exp_avg")
            },
        }


def _train(engine: Any, scenario: Scenario, case: dict[str, Any]) -> Outcome:
    micros = case.get("micros", 1)
    losses = []
    for step in range(STEPS):
        for micro in range(micros):
            skip = case.get("skips", {}).get(step, ())
            poison = scenario.poison.get(step)
            mine = {poison[1]: poison[2]} if poison and poison[0] == torch.distributed.get_rank() else None
            loss = engine(step, micro, skip, mine)
            engine.backward(loss)
        if step == 3:
            engine.optimizer.optimizer.param_groups[0].update(case.get("changes", {}))
        engine.step()
        losses.append(float(loss.detach()))
    stats = engine.optimizer.stats() if hasattr(engine.optimizer, "stats") else None
    found = {name: value.clone() for name, value in masters(engine).items()}
    return {"masters": found, "losses": losses, "stats": stats}


def both(ranks: Ranks, case: dict[str, Any]) -> tuple[Outcome, Outcome]:
    return ranks.run(run, "ours", case)[0], ranks.run(run, "upstream", case)[0]


def gradients(micros: int = 1, skips: dict[int, tuple[int, ...]] | None = None) -> list[list[dict[int, Tensor]]]:
    skips = skips or {}
    return [[gradients_of(step, micro, skips.get(step, ())) for micro in range(micros)] for step in range(STEPS)]


def test_both_are_right_where_nothing_happens(two_ranks: Ranks) -> None:
    """So that what the other tests see is not the stubs' doing."""
    expected = reference(gradients(), 1, 0.0)
    ours, theirs = both(two_ranks, {})
    assert distance(expected, ours["masters"]) < 1e-4
    assert distance(expected, theirs["masters"]) < 1e-4
    assert theirs["submitted"] == STEPS


def test_one_infinite_gradient(two_ranks: Ranks) -> None:
    ours, theirs = both(two_ranks, {"poison": {3: INF[3]}})
    assert distance(reference(gradients(), 1, 0.0, skip={3}), ours["masters"]) < 1e-4
    assert not all(bool(torch.isfinite(value).all()) for value in theirs["masters"].values()), (
        "upstream survives an Inf"
    )
    assert theirs["losses"][4] == theirs["losses"][4]
    assert theirs["losses"][5] != theirs["losses"][5], "upstream's loss is no longer NaN two steps later"


def test_two_backwards_before_a_step(two_ranks: Ranks) -> None:
    ours, theirs = both(two_ranks, {"micros": 2})
    expected = reference(gradients(2), 1, 0.0)
    assert distance(expected, ours["masters"]) < 1e-4
    assert distance(expected, theirs["masters"]) > 1e-2
    assert theirs["submitted"] == 2 * STEPS, "upstream no longer steps twice"


def test_an_unused_parameter(two_ranks: Ranks) -> None:
    """Upstream does not step the whole sub-group that it belongs to; here, all parameters."""
    skips: dict[int, tuple[int, ...]] = {2: (UNUSED,), 3: (UNUSED,)}
    ours, theirs = both(two_ranks, {"skips": skips})
    expected = reference(gradients(1, skips), 1, 0.0)
    others = {name: value for name, value in expected.items() if name != NAME}
    assert distance(expected, ours["masters"]) < 1e-4
    assert distance(others, theirs["masters"]) > 1e-2
    assert theirs["submitted"] == STEPS - 2, "upstream steps the sub-group now"


def test_unmanaged_accumulation(two_ranks: Ranks) -> None:
    case = {"config": {"accumulation": 2, "managed_gradient_accumulation": False}, "micros": 2}
    ours, theirs = both(two_ranks, case)
    initial = {name: param.detach() for name, param in Scenario().model().named_parameters()}
    assert distance(reference(gradients(2), 2, 0.0), ours["masters"]) < 1e-4
    assert theirs["submitted"] == 0
    assert distance(initial, theirs["masters"]) == 0.0, "upstream trains now"


def test_hyper_parameters_that_change(two_ranks: Ranks) -> None:
    changes = {"weight_decay": 0.9, "betas": (0.5, 0.6), "eps": 1e-3}
    ours, theirs = both(two_ranks, {"changes": changes})
    unchanged = two_ranks.run(run, "upstream", {})[0]
    assert distance(unchanged["masters"], theirs["masters"]) == 0.0, "upstream no longer ignores them"
    assert distance(unchanged["masters"], ours["masters"]) > 1e-3


def test_plain_adam(two_ranks: Ranks) -> None:
    """``adam_w_mode: false``: upstream decouples the weight decay all the same."""
    case = {"config": {"kind": "Adam", "optimizer": {"adam_w_mode": False, "weight_decay": 0.1}}}
    ours, theirs = both(two_ranks, case)
    assert distance(reference(gradients(), 1, 0.0), theirs["masters"]) < 1e-4, "upstream follows adam_w_mode now"
    assert distance(theirs["masters"], ours["masters"]) > 1e-2


def test_without_bias_correction(two_ranks: Ranks) -> None:
    """Upstream corrects all the same; that ours is right: test_hyper_parameters_are_those_of_the_groups."""
    case = {"config": {"optimizer": {"torch_adam": False, "bias_correction": False}}}
    ours, theirs = both(two_ranks, case)
    assert distance(reference(gradients(), 1, 0.0), theirs["masters"]) < 1e-4, "upstream follows bias_correction now"
    assert distance(theirs["masters"], ours["masters"]) > 1e-2


def test_loss_scale(two_ranks: Ranks) -> None:
    """Upstream's kernel gets gradients that are still scaled, which shows where eps counts."""
    case = {"config": {"precision": "fp16 128", "optimizer": {"eps": 1e-2}}}
    ours, theirs = both(two_ranks, case)
    unscaled = two_ranks.run(run, "ours", {"config": {"optimizer": {"eps": 1e-2}}})[0]["masters"]
    assert distance(unscaled, ours["masters"]) < 1e-2  # gradients were rounded to fp16
    assert distance(unscaled, theirs["masters"]) > 5e-2, "upstream unscales now"


def test_state_in_checkpoints(two_ranks: Ranks) -> None:
    _, theirs = both(two_ranks, {})
    assert not any(theirs["state"].values()), "upstream's moments are in its state_dict now"


def test_speculation_with_clipping(two_ranks: Ranks) -> None:
    """Upstream steps after the verdict where clipping is configured, though nothing is ever clipped here."""
    ours, theirs = both(two_ranks, {"config": {"clip": 1e6}})
    assert ours["stats"]["buckets_committed"] > 0
    assert theirs["submitted"] == STEPS
    assert two_ranks.run(submitted_before_step, 1e6)[0] == 0
    assert two_ranks.run(submitted_before_step, 0.0)[0] == 1


def submitted_before_step(clip: float) -> int:
    scenario = Scenario()
    with upstream.engine(config(UPSTREAM, precision="fp32", clip=clip), scenario.model()) as engine:
        engine.backward(scenario.loss_of(engine, 0, 0))
        found = int(engine.optimizer.superoffload_cpu_optimizer.submitted)
        engine.step()
    return found


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
