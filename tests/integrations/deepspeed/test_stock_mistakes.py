"""Where ours differs from stock ZeRO-Offload on purpose: unused parameters, and norms while the loss scale grows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.support.deepspeed.ranks import Ranks
from tests.support.deepspeed.scenarios import CLIP_SOME, UNUSED, WAYS, Scenario, distance, gradients_of, reference
from tests.support.deepspeed.training import config, end, make_engine, masters

STEPS = 6


@dataclass(frozen=True)
class Gaps:
    """(step, micro-batch) without the parameter, and a step whose gradient of it is infinite on one rank."""

    at: tuple[tuple[int, int], ...]
    accumulation: int = 1
    infinite: int | None = None

    def skip(self, step: int, micro: int) -> tuple[int, ...]:
        return (UNUSED,) if (step, micro) in self.at else ()


CASES = {
    "stepped with the gradient before": Gaps(((2, 0), (3, 0))),
    "infinite before": Gaps(((3, 0),), infinite=2),
    "used late in the window": Gaps(tuple((step, 0) for step in range(STEPS)), accumulation=2),
    "used early in the window": Gaps(tuple((step, 1) for step in range(STEPS)), accumulation=2),
}


def train_with_gaps(way: str, case: str) -> tuple[dict[str, Tensor], list[bool]]:
    gaps, applied = CASES[case], []
    engine = Scenario({"precision": "fp32", "clip": CLIP_SOME, "accumulation": gaps.accumulation}).engine(*WAYS[way])
    for step in range(STEPS):
        poison = {UNUSED: math.inf} if step == gaps.infinite and torch.distributed.get_rank() == 1 else None
        for micro in range(gaps.accumulation):
            engine.backward(engine(step, micro, gaps.skip(step, micro), poison))
            engine.step()
        applied.append(bool(engine.was_step_applied()))
    found = masters(engine)
    end(engine)
    return found, applied


@pytest.mark.parametrize("case", CASES)
def test_an_unused_parameter(case: str, two_ranks: Ranks) -> None:
    """It has a gradient of zeros, or of the micro-batches that use it."""
    gaps = CASES[case]
    micros = range(gaps.accumulation)
    windows = [[gradients_of(step, micro, gaps.skip(step, micro)) for micro in micros] for step in range(STEPS)]
    skipped = set() if gaps.infinite is None else {gaps.infinite}
    expected = reference(windows, gaps.accumulation, CLIP_SOME, skip=skipped)
    for way in ("ours, later", "match"):
        found, applied = two_ranks.run(train_with_gaps, way, case)[0]
        assert [step for step in range(STEPS) if not applied[step]] == list(skipped), way
        assert distance(expected, found) < 1e-4, way


def norms_of_a_growing_scale(way: str) -> list[float]:
    """fp16 whose scale doubles at every step: DeepSpeed divides by the doubled one."""
    offload, options = WAYS[way]
    configuration = config(offload, precision="fp16", options=options)
    configuration["fp16"].update(initial_scale_power=4, loss_scale_window=1)
    scenario = Scenario()
    engine = make_engine(configuration, scenario.model())
    norms: list[float] = scenario.train(engine, range(4))["norms"]
    end(engine)
    return norms


def test_the_norm_at_growth_of_the_loss_scale(two_ranks: Ranks) -> None:
    stock, match, ours = (two_ranks.run(norms_of_a_growing_scale, way)[0] for way in ("stock", "match", "ours, later"))
    assert match == stock
    assert ours[2:] == pytest.approx([2 * norm for norm in stock[2:]], rel=1e-5)
