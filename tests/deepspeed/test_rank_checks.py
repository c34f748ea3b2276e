"""What the rank checks find under ZeRO-3, on which rank; that they are quiet where nothing is wrong; what they cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.deepspeed.ranks import Ranks
from tests.deepspeed.scenarios import Scenario
from tests.deepspeed.test_convergence import drop_clip, skip_publish
from tests.deepspeed.training import OURS, end

SCENARIO = Scenario({"clip": 1e-3})  # every step is clipped
STEPS, PLANTED = 9, 5


def other_lr(engine: Any) -> None:
    engine.optimizer.param_groups[0]["lr"] = 4e-3


def one_step_less(engine: Any) -> None:
    """Its optimizer has stepped once more than the others'."""
    engine.optimizer._session.count(applied=True, factor=0.0)


FAULTS: dict[str, Callable[[Any], None]] = {
    function.__name__: function for function in (drop_clip, skip_publish, other_lr, one_step_less)
}


def train(options: dict[str, Any], fault: str | None, zero: dict[str, Any]) -> tuple[str, int]:
    """What the error said, and the step that raised it."""
    from superoffload.errors import RankError

    engine = Scenario({**SCENARIO.config, "zero": zero}).engine(OURS, options)
    found = ("", STEPS)
    for step in range(STEPS):
        engine.backward(SCENARIO.loss_of(engine, step, 0))
        if step == PLANTED and engine.global_rank == 1 and fault is not None:
            FAULTS[fault](engine)
        try:
            engine.step()
        except RankError as error:
            found = str(error), step
            break
    end(engine)
    return found


@pytest.mark.parametrize("delivery", ["eager", "on_demand"])
@pytest.mark.parametrize(
    ("fault", "check", "words"),
    [
        ("drop_clip", "light", "gradient factor"),
        ("other_lr", "light", "rank 1: lr of group 0 is 0.004, on rank 0 0.003"),
        ("one_step_less", "light", "the step before did not end alike"),
        ("skip_publish", "full", "rank 1: dots"),
    ],
)
def test_what_is_found(fault: str, check: str, words: str, delivery: str, two_ranks: Ranks) -> None:
    options = {"rank_check": check, "delivery": delivery}
    for said, step in two_ranks.run(train, options, fault, {}):
        assert words in said
        assert PLANTED <= step <= PLANTED + 1


@pytest.mark.parametrize("delivery", ["eager", "on_demand"])
@pytest.mark.parametrize("threshold", [0, 3000])
def test_quiet_where_nothing_is_wrong(threshold: int, delivery: str, two_ranks: Ranks) -> None:
    """Also with parameters that are never partitioned."""
    zero = {"stage3_param_persistence_threshold": threshold}
    for check in ("light", "full"):
        options = {"rank_check": check, "delivery": delivery, "speculation": "always"}
        assert two_ranks.run(train, options, None, zero) == [("", STEPS)] * 2


def test_off(two_ranks: Ranks) -> None:
    assert two_ranks.run(train, {"rank_check": "off"}, "drop_clip", {}) == [("", STEPS)] * 2


def write_and_train(delivery: str) -> None:
    """Users who write masters and parameters between steps are not told that a publish was lost."""
    import deepspeed
    import torch
    from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

    engine = SCENARIO.engine(OURS, {"rank_check": "light", "delivery": delivery})
    for step in range(12):  # more than there are parameters to look at
        engine.backward(SCENARIO.loss_of(engine, step, 0))
        engine.step()
        param = next(param for param in engine.module.parameters() if param.ds_numel % 2 == 0)
        if step % 2:
            safe_set_full_fp32_param(param, safe_get_full_fp32_param(param) + 0.5)
        else:
            with deepspeed.zero.GatheredParameters([param], modifier_rank=0):
                if torch.distributed.get_rank() == 0:
                    param.data.add_(0.25)
    end(engine)


@pytest.mark.parametrize("delivery", ["eager", "on_demand"])
def test_writes_of_users_are_no_faults(delivery: str, two_ranks: Ranks) -> None:
    two_ranks.run(write_and_train, delivery)


def patience(options: dict[str, Any]) -> float:
    engine = SCENARIO.engine(OURS, options)
    seconds: float = engine.optimizer._session.group.timeout
    end(engine)
    return seconds


def test_how_long_ranks_wait_for_each_other(two_ranks: Ranks) -> None:
    assert two_ranks.run(patience, {"rank_timeout": 45}) == [45.0] * 2
    assert two_ranks.run(patience, {}) == [60.0] * 2
