"""Runs `superoffload bench memory`: the resident memory of training, beside what stats() and plan say."""

from __future__ import annotations

import argparse
from typing import Any

from superoffload.tools.cli import measurement
from superoffload.tools.cli.options import add_option


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "memory",
        help="resident memory, and what stats() and plan say",
        description="Trains with each setting of masters and moments in a process of its own, and compares what its "
        "memory grows by with stats() after the last step, and with plan at the peak. Exits with 1 if either is off by "
        "more than 3 %%. Linux only.",
    )
    add_option(parser, "--numel", type=float, default=4e8, help="parameters, in bf16")
    add_option(parser, "--steps", type=int, default=40, help="of each setting")
    parser.add_argument("--json", metavar="PATH", help="write machine, versions and rows to this file")
    parser.add_argument("--quiet", action="store_true", help="no progress, only the result")
    return parser


def run(args: argparse.Namespace) -> int:
    measurement.check_at_least(args, 1 << 20, "numel")
    measurement.check_at_least(args, 1, "steps")
    from benchmarks.memory_use import SETTINGS, is_off, run_memory

    facts = measurement.begin(args)
    rows = run_memory(int(args.numel), args.steps, SETTINGS, measurement.progress(args))
    print(f"{'bytes per parameter':32} {'resident':>9} {'stats()':>9} {'peak':>9} {'plan':>9} {'journal':>9}")
    for row in rows:
        sizes = ("resident", "stats", "peak", "planned", "journal_reserved")
        print(f"{row['name']:32} " + " ".join(f"{row[f'{size}_bytes_per_param']:9.2f}" for size in sizes))
    measurement.write(args, {**facts, "limit": None, "rows": rows})
    return 1 if any(is_off(row) for row in rows) else 0
