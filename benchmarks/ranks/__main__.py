"""What the rank checks cost per step, and what it costs to know who owns what."""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks import command
from superoffload.tools.output import add_option


def make_parser() -> argparse.ArgumentParser:
    parser = command.parser(
        "ranks",
        description="Trains a sharded model (FSDP2, gloo, this machine's processors) with rank_check off, light and "
        "full in turn, and times the checks inside the steps. The smaller --rows, the shorter a step and the larger "
        "the share of the checks. --on-paper measures something else: what it costs ranks to know who owns what.",
    )
    add_option(parser, "--ranks", type=int, default=2, help="processes on this machine")
    add_option(parser, "--hidden", type=int, default=512, help="width of the model")
    add_option(parser, "--layers", type=int, default=4, help="of the model")
    add_option(parser, "--rows", type=int, default=4, help="of 64 tokens, per rank and step")
    add_option(parser, "--rounds", type=int, default=6, help="turns of each option")
    add_option(parser, "--steps", type=int, default=4, help="per turn")
    parser.add_argument(
        "--on-paper",
        type=int,
        metavar="RANKS",
        help="no processes: what so many ranks of a model with 8 billion parameters tell each other, and how long one "
        "takes to sort it",
    )
    parser.add_argument("--json", metavar="PATH", help="write machine, versions and rows to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 if light costs more than 1 %% of a step")
    return parser


def run(args: argparse.Namespace) -> int:
    command.check_at_least(args, 2, "ranks")
    command.check_at_least(args, 1, "hidden", "layers", "rows", "rounds", "steps")
    if args.on_paper is not None:
        return _on_paper(args)
    return _checks(args)


def _model(args: argparse.Namespace) -> Any:
    from benchmarks.training.config import ModelConfig

    return ModelConfig(
        layers=args.layers, hidden=args.hidden, heads=8, kv_heads=4, mlp=int(args.hidden * 2.6875), sequence=64
    )


def _on_paper(args: argparse.Namespace) -> int:
    from benchmarks.ranks.on_paper import layouts_of, on_paper

    layouts_of(args.on_paper)
    facts = command.begin(args)
    rows = on_paper(args.on_paper)
    size = f"{rows[0]['numel'] / 1e9:.2f} billion parameters"
    print(f"{size} on {args.on_paper} ranks, on paper; processor time of one rank:")
    for row in rows:
        print(
            f"{row['name']:24} {row['parameters']:4} parameters on a rank; once: exchanges {row['exchanges']}, sends "
            f"{row['bytes_sent']:6,} bytes, sorts in {row['seconds_median']:.2f} s; each step: "
            f"{row['step_bytes']} bytes, {1e3 * row['step_seconds_median']:.1f} ms"
        )
    command.write(args, {**facts, "limit": None, "rows": rows})
    return 0


def _checks(args: argparse.Namespace) -> int:
    from benchmarks.ranks.checks import LIGHT, PROMISE, Workload, run_ranks

    facts = command.begin(args)
    rows = run_ranks(Workload(_model(args), rows=args.rows, rounds=args.rounds, steps=args.steps), args.ranks)
    for row in rows:
        print(
            f"rank_check={row['name']:5}  step {1e3 * row['seconds_median']:8.1f} ms (x {row['ratio']:.3f})  "
            f"checks {1e3 * row['check_seconds_median']:7.3f} ms ({row['of_step']:6.2%} of the step)  "
            f"exchange {1e3 * row['exchange_seconds_median']:7.3f} ms  "
            f"noticing edits {1e3 * row['notice_seconds_median']:7.3f} ms ({row['notice_of_step']:6.2%})"
        )
    command.write(args, {**facts, "limit": None, "rows": rows})
    light = next(row for row in rows if row["name"] == LIGHT)
    return 1 if args.check and light["of_step"] > PROMISE else 0


if __name__ == "__main__":
    raise SystemExit(command.start(make_parser(), run))
