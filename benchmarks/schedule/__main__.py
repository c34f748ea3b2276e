"""What the schedule makes of a step, on an emulated accelerator."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from benchmarks import command
from superoffload.errors import ArgumentError
from superoffload.tools.output import add_option

_TOKENS = (2048, 4096, 6144, 8192, 12288)
_PARTS = ("model", "delivery", "traces", "micro-batches", "wall-clock")
_NUMEL, _QUICK = 1 << 25, 1 << 20


def make_parser() -> argparse.ArgumentParser:
    parser = command.parser(
        "schedule",
        description="Drives the real engine and schedule with an emulated accelerator: in virtual time with the "
        "figures of a Superchip, with new parameters that travel before or after the verdict, over named sequences of "
        "verdicts, in micro-batches with the figures of an H200, and in wall-clock time beside real work of this "
        "machine's processors. Exits with 1 if adaptive is more than 3 % slower than the best fixed choice on any "
        "sequence.",
    )
    add_option(parser, "--parameters", type=float, default=7e9, help="of the model in virtual time")
    parser.add_argument("--tokens", type=int, nargs="+", metavar="N", default=_TOKENS, help="per step, in virtual time")
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS, help="some of it (default: all)")
    add_option(parser, "--trace-steps", type=int, default=200, help="of each sequence of verdicts")
    add_option(parser, "--numel", type=int, default=_NUMEL, help="parameters beside real work")
    add_option(parser, "--threads", type=int, default=1, help="worker threads beside real work")
    add_option(parser, "--rounds", type=int, default=7, help="turns of each contestant")
    add_option(parser, "--steps", type=int, default=6, help="per turn")
    parser.add_argument("--quick", action="store_true", help="few steps and parameters, to see that it works")
    command.add_output_options(parser, facts="machine, versions, limit and rows")
    return parser


def run(args: argparse.Namespace) -> int:
    settings = _settings(args)
    from benchmarks.emulation.traces import SLOWEST
    from benchmarks.schedule import report as schedule_report
    from benchmarks.schedule.rows import run_schedule

    facts = command.begin(args)
    report = {**facts, **run_schedule(settings, command.progress(args))}
    print(schedule_report.tables(report))
    command.write(args, report, lambda path: schedule_report.plot(report, path))
    slow = [row for row in report["rows"] if row["part"] == "trace" and row["ratio"] > SLOWEST]
    for row in slow:
        print(f"{row['name']}: {row['ratio']:.3f} times the best fixed choice, {row['ratio_to']}", file=sys.stderr)
    return 1 if slow else 0


def _settings(args: argparse.Namespace) -> Any:
    from benchmarks.schedule.rows import ScheduleBenchmark
    from superoffload.host.processors import worker_cpus

    if not 1e6 <= args.parameters <= 1e13:
        raise ArgumentError(f"parameters={args.parameters:g}: expected from 1e6 to 1e13")
    if min(args.tokens) < 1:
        raise ArgumentError(f"tokens={min(args.tokens)}: expected positive numbers")
    if args.trace_steps < 40:
        raise ArgumentError(f"trace_steps={args.trace_steps}: expected at least 40, since the first 20 are not counted")
    command.check_at_least(args, 1 << 16, "numel")
    command.check_at_least(args, 1, "rounds", "steps")
    cpus = worker_cpus(args.threads)
    if args.quick:
        return ScheduleBenchmark(args.parts, args.parameters, args.tokens[:2], 60, min(args.numel, _QUICK), cpus, 1, 2)
    return ScheduleBenchmark(
        args.parts,
        args.parameters,
        args.tokens,
        args.trace_steps,
        args.numel,
        cpus,
        args.rounds,
        args.steps,
    )


if __name__ == "__main__":
    raise SystemExit(command.start(make_parser(), run))
