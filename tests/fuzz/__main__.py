"""`python -m tests.fuzz --programs 10000`: many programs by hand; exit 1 where one fails, with a short one like it."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded: its idle threads would spin

from tests.fuzz.campaign import Failure, Result, attempt, programs_until_found, run_many
from tests.fuzz.mutants import MUTANTS
from tests.fuzz.program import Program, draw

_TOGETHER = 50
_FAILURES = 3  # after so many it ends


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=1000, help="how many (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of the first; the others count on (default: 0)")
    parser.add_argument("--processes", type=int, default=1, help="that run programs side by side (default: 1)")
    parser.add_argument("--mutants", action="store_true", help="put mistakes in, and say how many programs find each")
    parser.add_argument("--replay", type=Path, help="run the program in this file instead")
    parser.add_argument("--show", type=int, metavar="SEED", help="print the program of this seed instead")
    chosen = parser.parse_args(arguments)
    if chosen.show is not None:
        print(draw(chosen.show).to_json(), end="")
        return 0
    if chosen.replay is not None:
        found = attempt(Program.from_json(chosen.replay.read_text()))
        print(found.traceback if isinstance(found, Failure) else "passed")
        return int(isinstance(found, Failure))
    if chosen.mutants:
        needed = {}
        for name, mutant in MUTANTS.items():
            needed[name] = programs_until_found(mutant, chosen.programs)
            print(f"| {name} | {needed[name] or 'not found'} |", flush=True)
        return int(None in needed.values())
    return _run(range(chosen.seed, chosen.seed + chosen.programs), chosen.processes)


def _run(seeds: range, processes: int) -> int:
    began, result = time.monotonic(), Result()
    parts = [seeds[start : start + _TOGETHER] for start in range(0, len(seeds), _TOGETHER)]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for part in pool.imap_unordered(partial(run_many, most_failures=_FAILURES), parts):
            result.add(part)
            print(f"\r{result.programs} programs, {len(result.failures)} failures", end="", file=sys.stderr, flush=True)
            if len(result.failures) >= _FAILURES:
                break
    print(file=sys.stderr)
    for name in sorted(result.counts):
        print(f"{result.counts[name]:>9} {name}")
    for failure in result.failures:
        print(f"\nseed {failure.program.seed}: {failure.why}\n{failure.program.to_json()}")
    print(f"{result.programs} programs in {time.monotonic() - began:.0f} s: {len(result.failures)} failures")
    return int(bool(result.failures))


if __name__ == "__main__":
    sys.exit(main())
