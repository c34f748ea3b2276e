"""The resident memory of training, beside what stats() and plan say."""

from __future__ import annotations

import argparse

from benchmarks import command
from superoffload.tools.output import add_option


def make_parser() -> argparse.ArgumentParser:
    parser = command.parser(
        "memory",
        description="Trains with each setting of masters and moments in a process of its own, and compares what its "
        "memory grows by with stats() after the last step, and with plan at the peak. Exits with 1 if stats() is off "
        "by more than 3 %%, or the peak more than that above plan and what backward alone takes. Linux only.",
    )
    add_option(parser, "--numel", type=float, default=4e8, help="parameters, in bf16")
    add_option(parser, "--steps", type=int, default=40, help="of each setting")
    parser.add_argument("--json", metavar="PATH", help="write machine, versions and rows to this file")
    parser.add_argument("--quiet", action="store_true", help="no progress, only the result")
    return parser


def run(args: argparse.Namespace) -> int:
    command.check_at_least(args, 1 << 20, "numel")
    command.check_at_least(args, 1, "steps")
    from benchmarks.memory.use import SETTINGS, is_off, run_memory

    facts = command.begin(args)
    rows = run_memory(int(args.numel), args.steps, SETTINGS, command.progress(args))
    print(f"{'bytes per parameter':32} {'resident':>9} {'stats()':>9} {'peak':>9} {'plan':>9} {'journal':>9}")
    for row in rows:
        sizes = ("resident", "stats", "peak", "planned", "journal_reserved")
        print(f"{row['name']:32} " + " ".join(f"{row[f'{size}_bytes_per_param']:9.2f}" for size in sizes))
    command.write(args, {**facts, "limit": None, "rows": rows})
    return 1 if any(is_off(row) for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(command.start(make_parser(), run))
