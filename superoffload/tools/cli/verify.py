"""Runs `superoffload verify`: the same training speculative and synchronous, compared bit for bit after every step."""

from __future__ import annotations

import argparse
import time
from typing import Any

from superoffload.errors import ArgumentError
from superoffload.tools.cli import verify_ranks
from superoffload.tools.cli.options import add_shared_options, config_from, corpus_limit
from superoffload.tools.train.injection import SYNTAX, Injection, parse_injection
from superoffload.tools.train.training_config import ModelConfig, TrainingConfig

DEFAULTS = TrainingConfig(model=ModelConfig(sequence=64), steps=24, batch=8, accumulation=2, max_grad_norm=8.0)

# Causes every fate of a speculated bucket, most of them more than once. The late clips find every bucket speculated, so
# there is something to replay; the others stop speculation once the partial norm proves the clip.
DEFAULT_INJECTION = (
    "nan@4,inf@6:late,clip@8-9:0.5x:late,clip@10:0.01,again@12,drop@14,lr@16:0.5,raise@18,"
    "nan@19:late,clip@20:0.5x,again@20,lr@21:2,clip@21:0.5x:late,drop@22,inf@22,clip@23:0.5x:late"
)


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "verify",
        help="prove that speculation changes nothing",
        description="Train twice from the same seeds, speculative and synchronous, with injected trouble, and compare\n"
        "SHA-256 digests of the gradients, masters, exp_avg, exp_avg_sq and published parameters after every step.\n"
        "Exits with 0 only if every digest is equal and, with the default --inject, every way a speculated bucket\n"
        "can go was taken. With --ranks, compares several ranks with each other and with one process instead.",
        epilog=SYNTAX,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_shared_options(parser, DEFAULTS, out="runs/verify")
    group = parser.add_argument_group("verify")
    group.add_argument(
        "--inject",
        metavar="EVENTS",
        help=f"trouble on purpose, see below, or an empty text for none (default: {DEFAULT_INJECTION})",
    )
    verify_ranks.add_options(parser)
    parser.set_defaults(steps=None)  # one process and several ranks have different ones
    return parser


def run(args: argparse.Namespace) -> int:
    if verify_ranks.is_wanted(args):
        return verify_ranks.run(args)
    steps = DEFAULTS.steps if args.steps is None else args.steps
    config = config_from(argparse.Namespace(**{**vars(args), "steps": steps}), DEFAULTS)
    from superoffload.tools.report.progress import Progress
    from superoffload.tools.report.run_folder import RunFolder, check_writable, write_json
    from superoffload.tools.report.verification_report import finish_verification, verification_summary
    from superoffload.tools.train.corpus import load_corpus
    from superoffload.tools.train.run_digests import deterministic_torch
    from superoffload.tools.train.verification import ComparedStep, verify

    default_events = args.inject is None
    injection = _injection(args.inject, config.steps)
    corpus = load_corpus(args.data, config.model.sequence, corpus_limit(args))
    check_writable(args.json, "json")
    started = time.perf_counter()
    with (
        deterministic_torch(config.torch_threads) as threads,
        RunFolder(args.out) as folder,
        Progress(config.steps, "verify", enabled=not args.quiet) as progress,
    ):
        progress.note(f"training twice for {config.steps} steps, speculative and synchronous, {threads} torch threads")

        def on_step(step: ComparedStep) -> None:
            folder.add_metrics(step.as_json())
            events = ", ".join(step.speculative.events)
            verdict = "DIFFERENT" if step.difference else "equal"
            progress.step(f"loss {step.speculative.loss:.3f}  digests {verdict}  {events}")

        result = verify(config, corpus, injection, must_exercise_all=default_events, on_step=on_step)
        seconds = time.perf_counter() - started
        summary = verification_summary(
            result, config, corpus, injection, default_events, seconds, threads, args.command_line
        )
    print(finish_verification(folder, summary, result))
    if args.json:
        write_json(args.json, summary)
    return 0 if result.verified else 1


def _injection(text: str | None, steps: int) -> Injection:
    if text is not None:
        return parse_injection(text, steps)
    if steps < DEFAULTS.steps:
        raise ArgumentError(
            f"steps={steps}: the default events need {DEFAULTS.steps} steps; train at least so many, or choose events "
            f"of your own with --inject (an empty text for none)"
        )
    return parse_injection(DEFAULT_INJECTION, steps)
