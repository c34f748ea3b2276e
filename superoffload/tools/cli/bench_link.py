"""Runs `superoffload bench link`: what waiting workers cost, how fast they wake, and on a GPU what a step costs."""

from __future__ import annotations

import argparse
from typing import Any

from superoffload.errors import ArgumentError
from superoffload.tools.cli import measurement
from superoffload.tools.cli.options import add_option

THREADS = (2, 16, 64)


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "link",
        help="what waiting for a link costs",
        description="Processor seconds of worker threads that wait for a gradient, and the time from an arrival to the "
        "first chunk. Where there is a CUDA device also what one more tensor and one more bucket cost in a step. In a "
        "checkout, python -m benchmarks.link takes the same steps over a stand-in for the driver.",
    )
    add_link_options(parser)
    return parser


def add_link_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `python -m benchmarks.link` has too."""
    threads = " ".join(map(str, THREADS))
    parser.add_argument(
        "--threads", nargs="+", type=int, default=THREADS, metavar="N", help=f"waiting workers (default: {threads})"
    )
    add_option(parser, "--seconds", type=float, default=3.0, help="to wait, with each number of workers")
    add_option(parser, "--arrivals", type=int, default=1000, help="that wake workers")
    add_option(parser, "--rounds", type=int, default=40, help="steps that are timed")
    parser.add_argument("--quick", action="store_true", help="few of everything, to see that it works")
    parser.add_argument("--json", metavar="PATH", help="write machine, versions and rows to this file")


def run(args: argparse.Namespace) -> int:
    import torch

    from superoffload.tools.bench.link_bandwidth import Rig

    rig = None
    if torch.cuda.is_available():
        rig = Rig(torch.device("cuda"), torch.cuda.synchronize)
    return run_link(args, rig)


def run_link(args: argparse.Namespace, rig: Any | None) -> int:
    """Measures the link. ``rig``: superoffload.tools.bench.link_bandwidth.Rig for steps; None measures waiting only."""
    if any(threads < 1 for threads in args.threads):
        raise ArgumentError(f"threads={args.threads}: expected numbers of at least 1")
    for name in ("seconds", "arrivals", "rounds"):
        if not getattr(args, name) > 0:
            raise ArgumentError(f"{name}={getattr(args, name)}: expected a positive number")
    from superoffload.tools.bench.link_bandwidth import line, measure_arrivals, measure_steps, measure_waiting

    facts = measurement.begin(args)
    seconds, arrivals, rounds = (0.2, 20, 2) if args.quick else (args.seconds, args.arrivals, args.rounds)
    rows = [measure_waiting(threads, seconds) for threads in args.threads]
    rows += [measure_arrivals(threads, arrivals) for threads in args.threads]
    rows += measure_steps(rig, rounds) if rig is not None else []
    for row in rows:
        print(line(row))
    measurement.write(args, {**facts, "limit": None, "rows": rows})
    return 0
