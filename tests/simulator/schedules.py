"""Runs many schedules by their seeds and counts the fates of their buckets."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

from tests.simulator.simulation import BrokenPromiseError, Simulation

_REPORTED = ("committed", "replayed", "undone", "skipped", "abandoned", "stepped", "two_phase")
_JOURNAL_BYTES = (None, 0.7, None, 1.3, None, 2.05)  # per parameter, for all buckets together; None: as built


def room_for_journals(seed: int) -> AbstractContextManager[Any]:
    """Gives journals and old upper halves less room than they want, in half of the schedules."""
    share = _JOURNAL_BYTES[seed // 2 % len(_JOURNAL_BYTES)]  # split masters go by odd and even
    if share is None:
        return nullcontext()
    return mock.patch("superoffload.engine.layout.reserved_bytes", lambda padded: int(share * padded))


def simulate(seeds: range, steps: int, tell: Callable[[str], None]) -> dict[str, int]:
    """Returns the counts of all schedules together. BrokenPromiseError names the seed."""
    totals = dict.fromkeys((*_REPORTED, "staged", "failures", "skips", "overflows"), 0)
    for number, seed in enumerate(seeds):
        with room_for_journals(seed):
            simulation = Simulation(seed, steps)
            simulation.run()
        if any(journal.users for journal in simulation.engine.layout.journals):
            raise BrokenPromiseError(f"seed {seed}: a bucket keeps its journal. Repeat it with --seed {seed}")
        stats = simulation.engine.stats()
        for name in _REPORTED:
            totals[name] += int(stats[f"buckets_{name}"])
        totals["staged"] += simulation.link.delivered_staged
        totals["failures"] += simulation.errors
        totals["skips"] += int(stats["skipped_steps"])
        totals["overflows"] += int(stats["journal_overflows"])
        if (number + 1) % 1000 == 0:
            tell(f"{number + 1} schedules")
    return totals
