"""What leaner masters and moments cost in accuracy, by training with and without."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import command
from benchmarks.demo_runs import add_training_options, check_steps
from benchmarks.training.config import STATE_SETTINGS, TrainingConfig
from superoffload.errors import ArgumentError

if TYPE_CHECKING:
    from benchmarks.state.tasks import Task

_DEFAULT, *_SETTINGS = STATE_SETTINGS
_PEERS = ("torchao 8bit", "torchao 4bit", "bitsandbytes 8bit")
_TEXT, _ENCODER = "text", "encoder"


def make_parser() -> argparse.ArgumentParser:
    parser = command.parser(
        "state",
        description="Trains with exp_avg and exp_avg_sq in fp32, in bf16 and in 8 bits (rounded stochastically), with "
        "whole and split masters, and with other libraries' 8-bit moments over fp32 masters, each with several seeds, "
        "and compares the held-out losses.",
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs per setting (default: 3)")
    parser.add_argument(
        "--settings",
        nargs="+",
        choices=(*_SETTINGS, *_PEERS),
        default=_SETTINGS,
        help=f"beside {_DEFAULT} (default: all of ours)",
    )
    parser.add_argument(
        "--task",
        choices=(_TEXT, _ENCODER),
        default=_TEXT,
        help="the demo's model on bytes of text, or the fine-tuning of examples/finetune.py",
    )
    parser.add_argument(
        "--continue",
        dest="continues",
        action="store_true",
        help="do not repeat the runs that the file of --json has; it is written after every run",
    )
    add_training_options(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    if args.seeds < 1:
        raise ArgumentError(f"seeds={args.seeds}: expected at least 1")
    if args.continues and not args.json:
        raise ArgumentError("continue: expected --json PATH, the file whose runs are not repeated")
    check_steps(args)
    _check_peers(args.settings)
    from tqdm import tqdm

    from benchmarks.results_file import write_results
    from benchmarks.state.accuracy import plot_state, run_state
    from benchmarks.training.repeatable import deterministic_torch

    facts = command.begin(args)
    task = _task(args)
    facts.update(task.describe())
    finished = _finished(Path(args.json), facts, task.steps) if args.continues else []
    seeds = range(args.seed, args.seed + args.seeds)
    runs = args.seeds * (1 + len(set(args.settings))) - len(finished)
    with deterministic_torch(None), tqdm(total=task.steps * runs, disable=args.quiet) as bar:

        def on_step(name: str, step: int) -> None:
            bar.set_description(f"{name}, step {step}", refresh=False)
            bar.update()

        found = run_state(
            task,
            args.settings,
            seeds,
            on_step,
            finished,
            lambda report: write_results(args.json, {**facts, **report}) if args.continues else None,
        )
    report = {**facts, **found}
    _print(report)
    command.write(args, report, lambda path: plot_state(report, path))
    return 0


def _check_peers(settings: list[str]) -> None:
    from benchmarks.adam.contestants import PeerMissing
    from benchmarks.adam.eight_bit_peers import PEERS

    for name in settings:
        try:
            if name in PEERS:
                PEERS[name].check()
        except PeerMissing as error:
            raise ArgumentError(f"settings: {name}: {error}; install it, or leave it out") from None


def _task(args: argparse.Namespace) -> Task:
    if args.task == _ENCODER:
        from benchmarks.state.encoder_task import EncoderTask

        return EncoderTask(args.steps)
    from benchmarks.state.tasks import TextTask
    from benchmarks.training.corpus import load_corpus

    config = TrainingConfig(steps=args.steps)
    return TextTask(config, load_corpus(args.data, config.model.sequence))


def _finished(path: Path, facts: dict[str, Any], steps: int) -> list[dict[str, Any]]:
    """Returns the runs that the file has; raises ArgumentError where they are not of the same training."""
    import json

    if not path.exists():
        return []
    before = json.loads(path.read_text(encoding="utf-8"))
    told = [name for name in ("versions", "corpus", "model", "data") if name in facts]
    different = [name for name in told if before.get(name) != facts[name]]
    if different or before.get("steps") != steps:
        raise ArgumentError(
            f"json={str(path)!r}: its runs differ in {', '.join(different or ['steps'])}; remove the file, or choose "
            "another one"
        )
    rows: list[dict[str, Any]] = before["rows"]
    return rows


def _print(report: dict[str, Any]) -> None:
    for row in report["rows"]:
        print(f"{row['name']:28} held-out loss {row['held_out_loss']:.4f}")
    for row in report["differences"]:
        half = row["half_interval"]
        interval = f" +- {half:.4f} (95 %)" if half is not None else ""
        print(f"{row['setting']} minus {_DEFAULT}, mean: {row['mean_difference']:+.4f}{interval} {report['unit']}")
    if report["spread_over_seeds"] is not None:
        print(f"spread of {_DEFAULT} over seeds (standard deviation): {report['spread_over_seeds']:.4f}")


if __name__ == "__main__":
    raise SystemExit(command.start(make_parser(), run))
