"""`python -m tests.simulator`: schedules by their seeds, each checked after every step."""

from __future__ import annotations

import argparse
import sys
import time

from tests.simulator.schedules import simulate
from tests.simulator.simulation import BrokenPromiseError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulator", description=__doc__)
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
