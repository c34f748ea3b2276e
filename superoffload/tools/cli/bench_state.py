"""Runs `superoffload bench state`: what leaner masters and moments cost in accuracy, by training with and without."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from superoffload.errors import ArgumentError
from superoffload.tools.cli import measurement
from superoffload.tools.cli.options import add_option
from superoffload.tools.train.training_config import STATE_SETTINGS, TrainingConfig

_DEFAULT, *_SETTINGS = STATE_SETTINGS

Measure = Callable[[TrainingConfig, Any, Callable[[str, int], None]], dict[str, Any]]
Plot = Callable[[dict[str, Any], Path], None]


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "state",
        help="accuracy of leaner moments and masters",
        description="Trains the demo's model with exp_avg and exp_avg_sq in fp32, in bf16 and in 8 bits (rounded "
        "stochastically), with whole and split masters, each with several seeds, and compares the held-out losses.",
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs per setting (default: 3)")
    parser.add_argument(
        "--settings", nargs="+", choices=_SETTINGS, default=_SETTINGS, help=f"beside {_DEFAULT} (default: all)"
    )
    add_training_options(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    if args.seeds < 1:
        raise ArgumentError(f"seeds={args.seeds}: expected at least 1")
    from superoffload.tools.bench.state_accuracy import DEFAULT, plot_state, run_state

    seeds = range(args.seed, args.seed + args.seeds)
    report = measure(
        args,
        args.seeds * (1 + len(set(args.settings))),
        lambda config, corpus, on_step: run_state(config, corpus, args.settings, seeds, on_step),
        plot_state,
    )
    for row in report["rows"]:
        print(f"{row['name']:24} held-out loss {row['held_out_loss']:.4f}")
    for row in report["differences"]:
        half = row["half_interval"]
        interval = f" +- {half:.4f} (95 %)" if half is not None else ""
        print(f"{row['setting']} minus {DEFAULT}, mean: {row['mean_difference']:+.4f}{interval} nats per byte")
    if report["spread_over_seeds"] is not None:
        print(f"spread of {DEFAULT} over seeds (standard deviation): {report['spread_over_seeds']:.4f}")
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
