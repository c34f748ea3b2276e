"""`python -m superoffload.emulation.simulate`: schedules by their seeds, each checked after every step."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

from superoffload.emulation.simulation import BrokenPromiseError, Simulation

_REPORTED = ("committed", "replayed", "undone", "skipped", "abandoned", "stepped", "two_phase")


def simulate(seeds: range, steps: int, tell: Callable[[str], None]) -> dict[str, int]:
    """What happened in all of them together. BrokenPromiseError names the seed."""
    totals = dict.fromkeys((*_REPORTED, "staged", "failures", "skips"), 0)
    for number, seed in enumerate(seeds):
        simulation = Simulation(seed, steps)
        simulation.run()
        stats = simulation.core.stats()
        for name in _REPORTED:
            totals[name] += int(stats[f"buckets_{name}"])
        totals["staged"] += simulation.link.delivered_staged
        totals["failures"] += simulation.errors
        totals["skips"] += int(stats["skipped_steps"])
        if (number + 1) % 1000 == 0:
            tell(f"{number + 1} schedules")
    return totals


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m superoffload.emulation.simulate", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule (default: 0)")
    parser.add_argument("--count", type=int, default=1, help="how many schedules (default: 1)")
    parser.add_argument("--steps", type=int, default=3, help="steps of each (default: 3)")
    args = parser.parse_args()
    began = time.perf_counter()
    try:
        totals = simulate(range(args.seed, args.seed + args.count), args.steps, lambda text: print(text, flush=True))
    except BrokenPromiseError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{args.count} schedules in {time.perf_counter() - began:.1f} s, every promise kept")
    print(", ".join(f"{name.replace('_', '-')} {count}" for name, count in totals.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
