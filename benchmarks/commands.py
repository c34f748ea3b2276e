"""What the commands share that measure in jobs, a call going on where the one before ended."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from superoffload.errors import ArgumentError

ROOT = Path(__file__).resolve().parents[1]


def add_options(parser: argparse.ArgumentParser, *, time_limit: float = float("inf")) -> None:
    parser.add_argument("--out", required=True, metavar="DIR", help="results; the same folder continues")
    parser.add_argument("--toy", action="store_true", help="sizes at which nothing is learned, to try that all works")
    default = "" if time_limit == float("inf") else f" (default: {time_limit:g})"
    parser.add_argument(
        "--time-limit", type=float, default=time_limit, metavar="SECONDS", help=f"of this call{default}"
    )
    parser.add_argument("--retry", action="store_true", help="try again what failed or took too long before")


def run_command(name: str, run: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """The exit status; 2 for arguments that ``run`` refuses."""
    try:
        return run(args)
    except ArgumentError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return 2


def say(line: str) -> None:
    print(line, flush=True)


def status_of(args: argparse.Namespace, left: Sequence[Any], jobs: Sequence[Any], *, failed: bool) -> int:
    """The exit status, once the last lines are printed. What is ``left`` matters more than what has failed."""
    from superoffload.benchmarking.jobs import LEFT

    if args.toy:
        print("toy sizes: these figures show that it works, and nothing else")
    if left:
        print(f"{len(left)} of {len(jobs)} left; the same command goes on")
        return LEFT
    return 1 if failed else 0
