"""Runs many schedules by their seeds and counts the fates of their buckets."""

from __future__ import annotations

from collections.abc import Callable

from tests.simulator.simulation import Simulation

_REPORTED = ("committed", "replayed", "undone", "skipped", "abandoned", "stepped", "two_phase")


def simulate(seeds: range, steps: int, tell: Callable[[str], None]) -> dict[str, int]:
    """Returns the counts of all schedules together. BrokenPromiseError names the seed."""
    totals = dict.fromkeys((*_REPORTED, "staged", "failures", "skips"), 0)
    for number, seed in enumerate(seeds):
        simulation = Simulation(seed, steps)
        simulation.run()
        stats = simulation.engine.stats()
        for name in _REPORTED:
            totals[name] += int(stats[f"buckets_{name}"])
        totals["staged"] += simulation.link.delivered_staged
        totals["failures"] += simulation.errors
        totals["skips"] += int(stats["skipped_steps"])
        if (number + 1) % 1000 == 0:
            tell(f"{number + 1} schedules")
    return totals
