"""`superoffload bench state`: what moments in bf16 cost in accuracy, by training with and without."""

from __future__ import annotations

import argparse
from typing import Any

from superoffload.errors import ArgumentError
from superoffload.tools.cli.bench_training import add_training_options, measure
from superoffload.tools.train.training_config import STATE_DTYPES


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "state",
        help="fp32 against bf16 moments",
        description="Trains the demo's model with exp_avg and exp_avg_sq in fp32 and in bf16 (stochastically rounded), "
        "with several seeds, and compares the held-out losses.",
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs per dtype (default: 3)")
    add_training_options(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    if args.seeds < 1:
        raise ArgumentError(f"seeds={args.seeds}: expected at least 1")
    from superoffload.tools.bench.state_dtypes import run_state
    from superoffload.tools.bench.training_plots import plot_state

    seeds = range(args.seed, args.seed + args.seeds)
    report = measure(
        args,
        args.seeds * len(STATE_DTYPES),
        lambda config, corpus, on_step: run_state(config, corpus, seeds, on_step),
        plot_state,
    )
    for row in report["rows"]:
        print(f"{row['name']:24} held-out loss {row['held_out_loss']:.4f}")
    spread = report["spread_over_seeds_fp32"]
    print(f"bf16 minus fp32, mean: {report['mean_difference']:+.4f} nats per byte", end="")
    print(f"; spread over seeds (standard deviation): {spread:.4f}" if spread is not None else "")
    return 0
