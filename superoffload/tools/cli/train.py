"""Runs `superoffload train`: trains a small model on real text; exits with 0 only if it learnt and stayed finite."""

from __future__ import annotations

import argparse
import math
import time
from typing import TYPE_CHECKING, Any

from superoffload.tools.cli.options import add_option, add_shared_options, config_from, corpus_limit
from superoffload.tools.train.injection import SYNTAX, parse_injection
from superoffload.tools.train.training_config import SPECULATION, TrainingConfig

if TYPE_CHECKING:
    from superoffload.tools.report.progress import Progress
    from superoffload.tools.report.run_folder import RunFolder
    from superoffload.tools.train.record import StepRecord
    from superoffload.tools.train.trainer import Trainer

DEFAULTS = TrainingConfig()


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "train",
        help="train a small language model on real text",
        description="Train a decoder-only transformer on bytes of text and report how well the optimizer was hidden.\n"
        "Exits with 0 only if the held-out loss fell and every loss, parameter and moment is finite.",
        epilog=SYNTAX,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_shared_options(parser, DEFAULTS, out="runs/train")
    group = parser.add_argument_group("train")
    add_option(group, "--speculation", choices=SPECULATION, default=DEFAULTS.speculation, help="when to step buckets")
    add_option(group, "--eval-every", type=int, default=DEFAULTS.eval_every, help="steps between held-out losses")
    group.add_argument("--inject", metavar="EVENTS", default="", help="trouble on purpose, see below")
    group.add_argument(
        "--trace", metavar="PATH", help="write a timeline of every step, for ui.perfetto.dev; shown in the report"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    config = config_from(args, DEFAULTS)
    from superoffload.tools.report.progress import Progress
    from superoffload.tools.report.run_folder import RunFolder, check_writable, write_json
    from superoffload.tools.report.training_report import finish_training, training_summary
    from superoffload.tools.train.corpus import load_corpus
    from superoffload.tools.train.run_digests import torch_threads
    from superoffload.tools.train.trainer import Trainer

    injection = parse_injection(args.inject, config.steps)
    corpus = load_corpus(args.data, config.model.sequence, corpus_limit(args))
    check_writable(args.json, "json")
    check_writable(args.trace, "trace")
    with (
        torch_threads(config.torch_threads) as threads,
        RunFolder(args.out) as folder,
        Trainer(config, corpus, injection, args.trace) as trainer,
        Progress(config.steps, "train", enabled=not args.quiet) as progress,
    ):
        progress.note(
            f"training {trainer.model.parameter_count():,} {config.dtype} parameters on {corpus.source} "
            f"({corpus.train.numel():,} bytes, {corpus.files} files), {config.tokens_per_step:,} bytes per step"
        )
        before = trainer.evaluate()
        progress.note(f"held-out loss before training: {before:.3f} nats per byte")
        started = time.perf_counter()
        records = _train(trainer, folder, progress)
        seconds = time.perf_counter() - started
        problems = check_training(trainer, records, before)
        summary = training_summary(trainer, corpus, records, before, seconds, threads, args.command_line, problems)
    print(finish_training(folder, summary, records, args.trace))
    if args.json:
        write_json(args.json, summary)
    return 1 if problems else 0


def _train(trainer: Trainer, folder: RunFolder, progress: Progress) -> list[StepRecord]:
    config = trainer.config
    records: list[StepRecord] = []
    clipped = 0
    for step in range(1, config.steps + 1):
        record = trainer.train_step(step)
        if step % config.eval_every == 0 or step == config.steps:
            record = record.with_held_out_loss(trainer.evaluate())
            progress.note(f"step {step}: held-out loss {record.held_out_loss:.3f}")
        records.append(record)
        clipped += record.clipped
        folder.add_metrics(record.as_json())
        progress.step(status_line(record, clipped / step))
        if not math.isfinite(record.loss):
            break
    return records


def status_line(record: StepRecord, clip_rate: float) -> str:
    norm = f"{record.grad_norm:.2f}" if record.grad_norm is not None else "-"
    return (
        f"loss {record.loss:.3f}  {record.tokens / record.seconds / 1e3:.1f}k tok/s  |g| {norm}  clip {clip_rate:.0%}  "
        f"hidden {1e3 * record.hidden_seconds:.1f} ms  exposed {1e3 * record.exposed_seconds:.1f} ms"
    )


def check_training(trainer: Trainer, records: list[StepRecord], before: float) -> list[str]:
    """Returns what is wrong with the run; empty if the loss fell and everything is finite."""
    import torch

    problems = []
    last = records[-1]
    if not math.isfinite(last.loss):
        problems.append(
            f"the loss of step {last.step} is {last.loss}: training diverged and was stopped; try a smaller --lr"
        )
    after = last.held_out_loss
    if after is not None and not after < before:
        problems.append(
            f"the held-out loss did not fall: {before:.4f} before, {after:.4f} after; train longer, or change --lr"
        )
    for name, parameter in trainer.model.named_parameters():
        state = trainer.optimizer.state[parameter]
        tensors = {
            "parameter": parameter.detach(),
            **{part: state[part] for part in ("master", "exp_avg", "exp_avg_sq")},
        }
        bad = [kind for kind, tensor in tensors.items() if not torch.isfinite(tensor).all()]
        if bad:
            problems.append(f"{name}: not finite after training: {', '.join(bad)}")
    return problems
