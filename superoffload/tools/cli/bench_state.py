"""Runs `superoffload bench state`: what moments in bf16 cost in accuracy, by training with and without."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from superoffload.errors import ArgumentError
from superoffload.tools.cli import measurement
from superoffload.tools.cli.options import add_option
from superoffload.tools.train.training_config import STATE_DTYPES, TrainingConfig

Measure = Callable[[TrainingConfig, Any, Callable[[str, int], None]], dict[str, Any]]
Plot = Callable[[dict[str, Any], Path], None]


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
    from superoffload.tools.bench.state_dtypes import plot_state, run_state

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


# ---- what `bench journal` does too ----------------------------------------------------------------------------------


def add_training_options(parser: argparse.ArgumentParser) -> None:
    add_option(parser, "--steps", type=int, default=300, help="of every run")
    add_option(parser, "--seed", type=int, default=0, help="of weights and batches")
    parser.add_argument("--data", nargs="+", metavar="PATH", help="text (default: the Python standard library)")
    measurement.add_output_options(parser)


def measure(args: argparse.Namespace, runs: int, work: Measure, plot: Plot) -> dict[str, Any]:
    """Runs `work` and writes the requested output; `runs` trainings of `args.steps` steps make the progress bar."""
    config = TrainingConfig(steps=args.steps, seed=args.seed)
    if config.steps < 20:
        raise ArgumentError(f"steps={config.steps}: expected at least 20, since the first 10 do not count")
    from superoffload.tools.report.progress import Progress
    from superoffload.tools.train.corpus import load_corpus
    from superoffload.tools.train.run_digests import deterministic_torch

    facts = measurement.begin(args)
    corpus = load_corpus(args.data, config.model.sequence)
    facts["corpus"] = corpus.describe()
    with (
        deterministic_torch(None),
        Progress(config.steps * runs, "bench", enabled=not args.quiet) as progress,
    ):
        report = {**facts, **work(config, corpus, lambda name, step: progress.step(f"{name}, step {step}"))}
    measurement.write(args, report, lambda path: plot(report, path))
    return report
