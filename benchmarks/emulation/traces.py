"""Times each schedule over named sequences of verdicts in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.emulation.training import EmulatedTraining, Machine, Workload
from superoffload.engine.schedule import Schedule, Situation

SETTLED_IN = 20  # steps that are not counted: the schedule learns
SLOWEST = 1.03  # the most that adaptive may take, over the best fixed choice


class FixedSchedule(Schedule):
    """Speculates all buckets or none; ``published`` is the share of the others that is stepped in two phases."""

    def __init__(self, *, speculates: bool, published: float) -> None:
        super().__init__("always" if speculates else "never")
        self._share_published = published

    def share_to_publish(self, situation: Situation) -> float:
        return self._share_published


def _random(chance: float) -> Callable[[int], list[bool]]:
    def trace(steps: int) -> list[bool]:
        source = random.Random(f"clips in {chance} of the steps")
        return [source.random() < chance for _ in range(steps)]

    return trace


TRACES: dict[str, Callable[[int], list[bool]]] = {
    "never clips": lambda steps: [False] * steps,
    "clips at every step": lambda steps: [True] * steps,
    "clips until step 1000": lambda steps: [step < 1000 for step in range(steps)],
    "alternates": lambda steps: [step % 2 == 0 for step in range(steps)],
    "random 10 %": _random(0.1),
    "random 50 %": _random(0.5),
    "random 90 %": _random(0.9),
}

FIXED: dict[str, Callable[[], Schedule]] = {
    "speculate": lambda: Schedule("always"),
    "one pass": lambda: Schedule("never"),
    "two-phase": lambda: FixedSchedule(speculates=False, published=1.0),
}


@dataclass(frozen=True)
class TraceResult:
    """Holds seconds after the first steps; ``fixed``: of each choice that is the same in every step."""

    adaptive: float
    fixed: dict[str, float]

    @property
    def best(self) -> str:
        return min(self.fixed, key=lambda name: self.fixed[name])

    @property
    def ratio(self) -> float:
        """Returns adaptive over the best fixed choice: below 1 it is faster than all of them."""
        return self.adaptive / self.fixed[self.best]


def run_trace(
    name: str, workload: Workload, machine: Machine, steps: int, *, norm: float = 4.0, on_demand: bool = True
) -> TraceResult:
    """Runs a trace; ``norm`` is that of a step that clips, in multiples of the threshold."""
    trace = TRACES[name](steps)

    def seconds(schedule: Schedule) -> float:
        training = EmulatedTraining(workload, machine, schedule, norm=norm, on_demand=on_demand)
        return sum(training.run(trace)[SETTLED_IN:])

    fixed = {choice: seconds(make()) for choice, make in FIXED.items()}
    return TraceResult(seconds(Schedule("adaptive")), fixed)
