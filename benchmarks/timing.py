"""Times contestants interleaved (A B C A B C ...), so that other load on the machine hits all of them alike.

A ratio is taken pair by pair within a round, and its median reported: two contestants of one round ran within
milliseconds of each other. Minima are reported too: on a busy machine they come closest to a quiet one.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeVar

T = TypeVar("T")

_SHORTEST_SAMPLE = 1e-3  # seconds; shorter work is repeated within one sample
_MOST_REPEATS = 200

# OpenMP threads spin for a while after their work and would slow down the next work on the same cores.
_SETTLING_SECONDS = 5e-3


@dataclass(frozen=True)
class Contestant:
    """Describes something to time; `seconds(repeats)` does the work that often and returns the mean time of one."""

    name: str
    isa: str
    bytes_per_param: float
    seconds: Callable[[int], float]
    settles: bool = False  # leaves threads behind that spin for a while

    @property
    def key(self) -> tuple[str, str]:
        return (self.name, self.isa)


def compared(contestants: Sequence[Contestant], rounds: Rounds, base: str) -> list[dict[str, Any]]:
    """Times contestants without instruction sets and returns a row for each, compared with ``base``."""
    samples = interleave(contestants, rounds)
    return [
        {
            "name": name,
            "rounds": len(one.seconds),
            "seconds_median": one.median,
            "seconds_min": one.minimum,
            "ratio_to": base,
            "ratio": one.ratio_to(samples[base, ""]),
        }
        for (name, _), one in samples.items()
    ]


def timed(
    run: Callable[[], object],
    prepare: Callable[[], object] | None = None,
    finish: Callable[[], object] | None = None,
) -> Callable[[int], float]:
    """Returns `Contestant.seconds` for a call; `prepare` runs before each call, `finish` after it, neither counted."""

    def seconds(repeats: int) -> float:
        total = 0.0
        for _ in range(repeats):
            if prepare is not None:
                prepare()
            began = time.perf_counter()
            run()
            total += time.perf_counter() - began
            if finish is not None:
                finish()
        return total / repeats

    return seconds


@dataclass(frozen=True)
class Samples:
    """Holds the times of one contestant, one per round."""

    contestant: Contestant
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def minimum(self) -> float:
        return min(self.seconds)

    def ratio_to(self, other: Samples) -> float:
        """Returns the median over the rounds of the ratio to `other` within each."""
        return median(mine / theirs for mine, theirs in zip(self.seconds, other.seconds, strict=True))


@dataclass(frozen=True)
class Rounds:
    """Sets how long to measure: at least `least` rounds, then until `seconds` have passed or `most` rounds are done."""

    least: int
    most: int
    seconds: float


def interleave(contestants: Sequence[Contestant], rounds: Rounds) -> dict[tuple[str, str], Samples]:
    """Times all contestants round by round, each round starting with another one."""
    samples = {contestant.key: Samples(contestant) for contestant in contestants}
    if len(samples) != len(contestants):
        raise ValueError(f"contestants: two of the same name and instruction set in {list(samples)}")
    with no_garbage_collection():
        repeats = {contestant.key: _repeats_for(contestant) for contestant in contestants}
        began = time.perf_counter()
        for index in range(rounds.most):
            if index >= rounds.least and time.perf_counter() - began > rounds.seconds:
                break
            for contestant in in_turn(contestants, index):
                samples[contestant.key].seconds.append(_sample(contestant, repeats[contestant.key]))
    return samples


def in_turn(entrants: Sequence[T], number: int) -> list[T]:
    """Returns the order of a round: each begins with another one, so that none always follows the same one."""
    first = number % len(entrants)
    return [*entrants[first:], *entrants[:first]]


def _repeats_for(contestant: Contestant) -> int:
    """Returns the repeats from a second run's time: the first run warms up caches, threads and allocators."""
    _sample(contestant, 1)
    seconds = _sample(contestant, 1)
    return max(1, min(_MOST_REPEATS, round(_SHORTEST_SAMPLE / max(seconds, 1e-9))))


def _sample(contestant: Contestant, repeats: int) -> float:
    seconds = contestant.seconds(repeats)
    if contestant.settles:
        time.sleep(_SETTLING_SECONDS)
    return seconds


class Stopwatch:
    """Adds up the ``seconds`` in functions; of nested ones, the outermost counts."""

    def __init__(self) -> None:
        self.seconds, self._depth = 0.0, 0

    def wrap(self, owner: Any, *names: str) -> None:
        """Replaces methods of an object by timed ones."""
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            self._depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.seconds += time.perf_counter() - began

        return timed


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
