"""Bytes per parameter in each step of real training, also with spiking gradients."""

from __future__ import annotations

import argparse

from benchmarks import command
from benchmarks.demo_runs import add_training_options, measure
from superoffload.errors import ArgumentError

FACTORS = (1.0, 3.0, 10.0, 30.0, 100.0)


def make_parser() -> argparse.ArgumentParser:
    parser = command.parser(
        "journal",
        description="Trains the demo's model with every step speculated and reports the journal's bytes per parameter, "
        "without clipping and with gradients that are a factor larger than the clipped ones.",
    )
    parser.add_argument(
        "--factors", nargs="+", type=float, default=FACTORS, metavar="R", help="spike factors (default: 1 3 10 30 100)"
    )
    add_training_options(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    if any(not 1 <= factor <= 1e6 for factor in args.factors):
        raise ArgumentError(f"factors={args.factors}: expected numbers from 1 to 1e6")
    from benchmarks.journal.sizes import plot_journal, run_journal

    report = measure(
        args,
        len(args.factors),
        lambda config, corpus, on_step: {"rows": run_journal(config, corpus, args.factors, on_step)},
        plot_journal,
    )
    print(f"{'run':36} {'mean B/param':>12} {'largest':>8} {'overflows':>9} {'reserved':>8}   after step 10")
    for row in report["rows"]:
        mean, largest = row["mean_after_step_10"], row["largest_after_step_10"]
        sizes = f"{mean:>12.3f} {largest:>8.3f}" if mean is not None else f"{'-':>12} {'-':>8}"
        print(f"{row['name']:36} {sizes} {row['overflows_after_step_10']:>9} {row['reserved_bytes_per_param']:>8.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(command.start(make_parser(), run))
