"""Trains the demo's model in benchmarks: options, text, progress and output."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import command
from benchmarks.training.config import TrainingConfig
from superoffload.errors import ArgumentError
from superoffload.tools.output import add_option

Measure = Callable[[TrainingConfig, Any, Callable[[str, int], None]], dict[str, Any]]
Plot = Callable[[dict[str, Any], Path], None]


def add_training_options(parser: argparse.ArgumentParser) -> None:
    add_option(parser, "--steps", type=int, default=300, help="of every run")
    add_option(parser, "--seed", type=int, default=0, help="of weights and batches")
    parser.add_argument("--data", nargs="+", metavar="PATH", help="text (default: the Python standard library)")
    command.add_output_options(parser)


def measure(args: argparse.Namespace, runs: int, work: Measure, plot: Plot) -> dict[str, Any]:
    """Runs `work` and writes the requested output; `runs` trainings of `args.steps` steps make the bar."""
    check_steps(args)
    config = TrainingConfig(steps=args.steps, seed=args.seed)
    from tqdm import tqdm

    from benchmarks.training.corpus import load_corpus
    from benchmarks.training.repeatable import deterministic_torch

    facts = command.begin(args)
    corpus = load_corpus(args.data, config.model.sequence)
    facts["corpus"] = corpus.describe()
    with deterministic_torch(None), tqdm(total=config.steps * runs, disable=args.quiet) as bar:

        def on_step(name: str, step: int) -> None:
            bar.set_description(f"{name}, step {step}", refresh=False)
            bar.update()

        report = {**facts, **work(config, corpus, on_step)}
    command.write(args, report, lambda path: plot(report, path))
    return report


def check_steps(args: argparse.Namespace) -> None:
    if args.steps < 20:
        raise ArgumentError(f"steps={args.steps}: expected at least 20, since the first 10 do not count")
