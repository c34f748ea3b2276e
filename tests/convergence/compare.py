"""Compares curves: are they bit-equal, and does one stay within what another order of summation changes?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from superoffload.errors import SuperOffloadError
from tests.convergence.distributed_run import Curve

FEWEST_RUNS = 5
ONE_PROCESS = "one process"
# A few runs underestimate how far another one strays: allow three times the largest spread seen, and a floor for the
# first steps, in which all runs agree to the last bits.
SAFETY = 3.0
FLOOR = 1e-4


@dataclass(frozen=True)
class Tolerance:
    """Holds the mean of runs that differ only in the order of summation, and how far they stray from it; ``of``: what
    made these runs."""

    losses: list[float]
    loss_spread: list[float]
    norms: list[float]
    norm_spread: list[float]
    weights: dict[str, Tensor]
    weight_spread: dict[str, float]
    of: str = ONE_PROCESS

    def allowed_losses(self) -> list[float]:
        return [_allowed(centre, spread) for centre, spread in zip(self.losses, self.loss_spread, strict=True)]

    def describe(self) -> dict[str, float]:
        return {
            "loss_at_the_end": SAFETY * self.loss_spread[-1] + FLOOR,
            "norm_at_the_end": SAFETY * self.norm_spread[-1] + FLOOR,
            "largest_relative_weight": max(self.weight_spread.values()),
        }


def tolerance_of(runs: Sequence[Curve], of: str = ONE_PROCESS) -> Tolerance:
    assert len(runs) >= FEWEST_RUNS
    for run in runs:
        if run.error:
            raise SuperOffloadError(f"{of}, which all else is compared with, has failed: {run.error}")
    losses, loss_spread = _centre_and_spread([run.losses for run in runs])
    norms, norm_spread = _centre_and_spread([run.norms for run in runs])
    weights = {name: sum((run.weights[name] for run in runs[1:]), first) / len(runs)
               for name, first in runs[0].weights.items()}  # fmt: skip
    spread = {name: max(_distance(run.weights[name], centre) for run in runs) for name, centre in weights.items()}
    return Tolerance(losses, loss_spread, norms, norm_spread, weights, spread, of)


def _centre_and_spread(curves: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    """Returns per step the mean, and the largest distance from it in any step so far."""
    steps = list(zip(*curves, strict=True))
    centres = [math.fsum(values) / len(values) if all(map(math.isfinite, values)) else math.inf for values in steps]
    strayed = (max(abs(value - centre) if math.isfinite(centre) else 0.0 for value in values)
               for centre, values in zip(centres, steps, strict=True))  # fmt: skip
    return centres, list(accumulate(strayed, max))


def _allowed(centre: float, spread: float) -> float:
    return SAFETY * spread + FLOOR * (max(1.0, abs(centre)) if math.isfinite(centre) else 1.0)


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-12))


def stray(curve: Curve, tolerance: Tolerance) -> list[str]:
    """Returns where ``curve`` leaves the tolerance; empty if it stays within."""
    problems = []
    for what, values, centres, spreads in (
        ("loss", curve.losses, tolerance.losses, tolerance.loss_spread),
        ("gradient norm", curve.norms, tolerance.norms, tolerance.norm_spread),
    ):
        for step, (value, centre, spread) in enumerate(zip(values, centres, spreads, strict=False), 1):
            allowed = _allowed(centre, spread)
            finite = math.isfinite(centre)
            if math.isfinite(value) != finite or (finite and abs(value - centre) > allowed):
                problems.append(
                    f"step {step}: {what} is {value:.5f}, with {tolerance.of} {centre:.5f}, tolerance {allowed:.5f}"
                )
                break
    if curve.error:
        problems.append(curve.error)
    elif len(curve.losses) == len(tolerance.losses):
        for name, mean in tolerance.weights.items():
            distance, allowed = _distance(curve.weights[name], mean), SAFETY * tolerance.weight_spread[name] + FLOOR
            if distance > allowed:
                problems.append(f"at the end: {name} is off by {distance:.2e} of its norm, allowed are {allowed:.2e}")
    return problems


def unequal(one: Sequence[Curve], other: Sequence[Curve]) -> list[str]:
    """Returns differences between two runs that must be bit-equal on each rank."""
    problems = []
    for rank, (a, b) in enumerate(zip(one, other, strict=True)):
        problems += [f"rank {rank}: {curve.speculation}: {curve.error}" for curve in (a, b) if curve.error]
        pairs = zip(a.losses, b.losses, strict=False)
        different = [step for step, (x, y) in enumerate(pairs, 1) if x != y and not math.isnan(x) & math.isnan(y)]
        different += [step for step in a.digests if a.digests[step] != b.digests.get(step)]
        if different:
            step = min(different)
            theirs = b.digests.get(step, {})
            parts = [part for part, digest in a.digests.get(step, {}).items() if digest != theirs.get(part)]
            what = ", ".join(parts) or "loss"
            problems.append(f"rank {rank}: step {step}: {what}: speculative and synchronous differ")
    return problems
