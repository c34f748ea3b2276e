"""Runs `superoffload bench ranks`: what the rank checks cost per step."""

from __future__ import annotations

import argparse
from typing import Any

from superoffload.tools.cli import measurement
from superoffload.tools.cli.options import add_option


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "ranks",
        help="the cost of the rank checks",
        description="Trains a sharded model (FSDP2, gloo, this machine's processors) with rank_check off, light and "
        "full in turn, and times the checks inside the steps. The smaller --rows, the shorter a step and the larger "
        "the share of the checks.",
    )
    add_option(parser, "--ranks", type=int, default=2, help="processes on this machine")
    add_option(parser, "--hidden", type=int, default=512, help="width of the model")
    add_option(parser, "--layers", type=int, default=4, help="of the model")
    add_option(parser, "--rows", type=int, default=4, help="of 64 tokens, per rank and step")
    add_option(parser, "--rounds", type=int, default=6, help="turns of each option")
    add_option(parser, "--steps", type=int, default=4, help="per turn")
    parser.add_argument("--json", metavar="PATH", help="write machine, versions and rows to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 if light costs more than 1 %% of a step")
    return parser


def run(args: argparse.Namespace) -> int:
    measurement.check_at_least(args, 2, "ranks")
    measurement.check_at_least(args, 1, "hidden", "layers", "rows", "rounds", "steps")
    from benchmarks.rank_checks import LIGHT, PROMISE, Workload, run_ranks
    from superoffload.tools.train.training_config import ModelConfig

    model = ModelConfig(
        layers=args.layers, hidden=args.hidden, heads=8, kv_heads=4, mlp=int(args.hidden * 2.6875), sequence=64
    )
    facts = measurement.begin(args)
    rows = run_ranks(Workload(model, rows=args.rows, rounds=args.rounds, steps=args.steps), args.ranks)
    for row in rows:
        print(
            f"rank_check={row['name']:5}  step {1e3 * row['seconds_median']:8.1f} ms (x {row['ratio']:.3f})  "
            f"checks {1e3 * row['check_seconds_median']:7.3f} ms ({row['of_step']:6.2%} of the step)  "
            f"exchange {1e3 * row['exchange_seconds_median']:7.3f} ms  "
            f"noticing edits {1e3 * row['notice_seconds_median']:7.3f} ms ({row['notice_of_step']:6.2%})"
        )
    measurement.write(args, {**facts, "limit": None, "rows": rows})
    light = next(row for row in rows if row["name"] == LIGHT)
    return 1 if args.check and light["of_step"] > PROMISE else 0
