"""What waiting workers cost, how fast they wake, and on a GPU what a step costs."""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks import command
from superoffload.errors import ArgumentError
from superoffload.tools.output import add_option

THREADS = (2, 16, 64)


def make_parser() -> argparse.ArgumentParser:
    parser = command.parser(
        "link",
        description="Processor seconds of worker threads that wait for a gradient, and the time from an arrival to the "
        "first chunk. Also what one more tensor and one more bucket cost in a step: on a CUDA device, or without "
        "one over a stand-in for the driver.",
    )
    threads = " ".join(map(str, THREADS))
    parser.add_argument(
        "--threads", nargs="+", type=int, default=THREADS, metavar="N", help=f"waiting workers (default: {threads})"
    )
    add_option(parser, "--seconds", type=float, default=3.0, help="to wait, with each number of workers")
    add_option(parser, "--arrivals", type=int, default=1000, help="that wake workers")
    add_option(parser, "--rounds", type=int, default=40, help="steps that are timed")
    parser.add_argument("--quick", action="store_true", help="few of everything, to see that it works")
    parser.add_argument("--json", metavar="PATH", help="write machine, versions and rows to this file")
    return parser


def run(args: argparse.Namespace) -> int:
    import torch

    from benchmarks.facts import machine_facts
    from benchmarks.link.stand_in import stand_in
    from benchmarks.link.steps import Rig

    if torch.cuda.is_available():
        print(f"steps on {torch.cuda.get_device_name()}; CPU: {machine_facts()['cpu']}")
        return measure(args, Rig(torch.device("cuda"), torch.cuda.synchronize))
    print(f"no GPU: steps over a stand-in for the driver, whose copies are memcpy; CPU: {machine_facts()['cpu']}")
    with stand_in() as rig:
        return measure(args, rig)


def measure(args: argparse.Namespace, rig: Any) -> int:
    """Measures waiting, and steps over ``rig``."""
    if any(threads < 1 for threads in args.threads):
        raise ArgumentError(f"threads={args.threads}: expected numbers of at least 1")
    for name in ("seconds", "arrivals", "rounds"):
        if not getattr(args, name) > 0:
            raise ArgumentError(f"{name}={getattr(args, name)}: expected a positive number")
    from benchmarks.link.steps import line, measure_arrivals, measure_steps, measure_waiting

    facts = command.begin(args)
    seconds, arrivals, rounds = (0.2, 20, 2) if args.quick else (args.seconds, args.arrivals, args.rounds)
    rows = [measure_waiting(threads, seconds) for threads in args.threads]
    rows += [measure_arrivals(threads, arrivals) for threads in args.threads]
    rows += measure_steps(rig, rounds)
    for row in rows:
        print(line(row))
    command.write(args, {**facts, "limit": None, "rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(command.start(make_parser(), run))
