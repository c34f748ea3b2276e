"""What `bench journal` and `bench state` share: the demo's model and text, progress, JSON and plot."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from superoffload.errors import ArgumentError
from superoffload.tools.cli import measurement
from superoffload.tools.cli.options import add_option
from superoffload.tools.train.training_config import TrainingConfig

Measure = Callable[[TrainingConfig, Any, Callable[[str, int], None]], dict[str, Any]]
Plot = Callable[[dict[str, Any], Path], None]


def add_training_options(parser: argparse.ArgumentParser) -> None:
    add_option(parser, "--steps", type=int, default=300, help="of every run")
    add_option(parser, "--seed", type=int, default=0, help="of weights and batches")
    parser.add_argument("--data", nargs="+", metavar="PATH", help="text (default: the Python standard library)")
    parser.add_argument("--json", metavar="PATH", help="write machine, versions and rows to this file")
    parser.add_argument("--plot", metavar="PATH", help="draw a PNG")
    parser.add_argument("--quiet", action="store_true", help="no progress, only the result")


def measure(args: argparse.Namespace, runs: int, work: Measure, plot: Plot) -> dict[str, Any]:
    """Runs `work` and writes what was asked for; `runs` trainings of `args.steps` steps for the progress bar."""
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
