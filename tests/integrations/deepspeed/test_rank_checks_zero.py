"""What the rank checks find under ZeRO, on which rank; that they are quiet where nothing is wrong; what they cost."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from superoffload.errors import RankError
from tests.support.deepspeed.ranks import Ranks
from tests.support.deepspeed.scenarios import Scenario
from tests.support.deepspeed.training import OURS, STOCK, batch, config, end, make_engine

SCENARIO = Scenario({"clip": 1e-3})  # every step is clipped
STEPS, PLANTED = 9, 5


def other_lr(engine: Any) -> None:
    engine.optimizer.param_groups[0]["lr"] = 4e-3


def one_step_less(engine: Any) -> None:
    """Its optimizer has stepped once more than the others'."""
    engine.optimizer.parts.ranks.session.count(applied=True, factor=0.0)


def skip_publish(engine: Any) -> None:
    """One bucket of this step is not delivered."""
    link = engine.optimizer.parts.driver.engine.link
    deliver = link.deliver

    def lost(bucket: Any, after: Any) -> Any:
        link.deliver = deliver
        return after

    link.deliver = lost


def drop_clip(engine: Any) -> None:
    """This rank steps as if nothing had to be clipped, and reports that it did."""
    steps: Any = import_module("superoffload.integrations.deepspeed.zero.steps")
    clip = steps.clip

    def unclipped(norm: Tensor, scale: float, threshold: float) -> tuple[float, float]:
        steps.clip = clip
        coefficient, _ = clip(norm, scale, threshold)
        assert coefficient < 1.0, "nothing was clipped, so nothing was planted"
        return coefficient, 1.0 / scale

    steps.clip = unclipped


def train(options: dict[str, Any], fault: Callable[[Any], None] | None, zero: dict[str, Any]) -> tuple[str, int]:
    """What the error said, and the step that raised it."""
    engine = Scenario({**SCENARIO.config, "zero": zero}).engine(OURS, options)
    try:
        for step in range(STEPS):
            engine.backward(SCENARIO.loss_of(engine, step, 0))
            if step == PLANTED and engine.global_rank == 1 and fault is not None:
                fault(engine)
            engine.step()
        return "", STEPS
    except RankError as error:
        return str(error), step
    finally:
        end(engine)


@pytest.mark.parametrize(
    ("fault", "check", "delivery", "stage", "words"),
    [
        (drop_clip, "light", "on_demand", 3, "gradient factor"),
        (drop_clip, "off", "eager", 3, ""),
        (other_lr, "light", "eager", 3, "rank 1: lr of group 0 is 0.004, on rank 0 0.003"),
        (one_step_less, "light", "on_demand", 3, "the step before did not end alike"),
        (skip_publish, "full", "on_demand", 3, "rank 1: dots"),
        (drop_clip, "light", "eager", 2, "gradient factor"),
        (other_lr, "light", "on_demand", 1, "rank 1: lr of group 0 is 0.004, on rank 0 0.003"),
        (skip_publish, "full", "eager", 2, "rank 1: dots"),
    ],
)
def test_what_is_found(fault: Any, check: str, delivery: str, stage: int, words: str, two_ranks: Ranks) -> None:
    options = {"rank_check": check, "delivery": delivery}
    for said, step in two_ranks.run(train, options, fault, {"stage": stage}):
        assert words in said and bool(words) == bool(said)
        assert step == STEPS if check == "off" else PLANTED <= step <= PLANTED + 1


def autocast(offload: dict[str, Any], options: dict[str, Any] | None, zero: dict[str, Any], stale: bool) -> Any:
    """Losses, and what the error said. ``stale``: what rank 1 publishes of one parameter is not what is gathered."""
    from deepspeed.runtime import torch_autocast

    state = {name: getattr(torch_autocast, name) for name in ("TORCH_AUTOCAST_INITIALIZED", "TORCH_AUTOCAST_DTYPE")}
    dtype: Any = {"precision": "fp32", "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    losses: list[float] = []
    with mock.patch.multiple(torch_autocast, **state):  # DeepSpeed never forgets it
        engine = make_engine(config(offload, options=options, zero=zero, clip=1.0, **dtype))
        try:
            for step in range(6):
                loss = engine(*batch(step))
                losses.append(loss.item())
                engine.backward(loss)
                if step == 1 and stale and engine.global_rank == 1:
                    param = engine.module.head.weight
                    param.ds_tensor.data = param.ds_tensor.data.clone()
                engine.step()
            return losses, ""
        except RankError as error:
            return losses, str(error)
        finally:
            end(engine)


@pytest.mark.parametrize(("threshold", "check", "delivery"), [(0, "light", "eager"), (3000, "full", "on_demand")])
def test_torch_autocast_gathers_in_its_own_dtype(threshold: int, check: str, delivery: str, two_ranks: Ranks) -> None:
    """Parameters are fp32, and what forward reads of them was rounded to bf16 and back."""
    zero = {"stage3_param_persistence_threshold": threshold}
    stock = two_ranks.run(autocast, STOCK, None, zero, False)
    options = {"rank_check": check, "delivery": delivery, "match_stock": True, "speculation": "always"}
    for (losses, said), (expected, _) in zip(two_ranks.run(autocast, OURS, options, zero, False), stock, strict=True):
        assert said == ""
        assert losses == pytest.approx(expected, rel=1e-2)
    words = "rank 0: head.weight: what its forward reads is not what rank 1 has published"
    for _, said in two_ranks.run(autocast, OURS, {"rank_check": "light"}, zero, True):
        assert words in said


def write_and_train(delivery: str, check: str) -> None:
    """Users who write masters and parameters between steps, NaN too, are not told that a publish was lost."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

    engine = SCENARIO.engine(OURS, {"rank_check": check, "delivery": delivery})
    one, other = [param for param in engine.module.parameters() if param.ds_numel % 2 == 0][:2]
    for step in range(12):  # more than there are parameters to look at
        engine.backward(SCENARIO.loss_of(engine, step, 0))
        engine.step()
        if step % 2:
            safe_set_full_fp32_param(one, safe_get_full_fp32_param(one) + 0.5)
            continue
        with deepspeed.zero.GatheredParameters([one, other], modifier_rank=0):
            if torch.distributed.get_rank() == 0:
                one.data.add_(0.25)
                if step > 6:
                    other.data.view(-1)[1:3] = torch.nan
    end(engine)


@pytest.mark.parametrize(("delivery", "check"), [("eager", "full"), ("on_demand", "light")])
def test_writes_of_users_are_no_faults(delivery: str, check: str, two_ranks: Ranks) -> None:
    two_ranks.run(write_and_train, delivery, check)
