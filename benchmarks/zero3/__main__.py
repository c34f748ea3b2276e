"""DeepSpeed ZeRO-3 with stock CPU offload and with superoffload."""

from __future__ import annotations

import argparse
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from benchmarks import command
from superoffload.errors import ArgumentError
from superoffload.tools.output import add_option


def make_parser() -> argparse.ArgumentParser:
    parser = command.parser(
        "zero3",
        description="Trains one model under DeepSpeed ZeRO-3 with stock CPU offload and with superoffload, eager "
        "and on demand, in the same processes, steps taken in turn; on GPUs, where there are some, also with "
        "DeepSpeed's own SuperOffload. Ratios are those of turns side by side.",
    )
    parser.add_argument("--ranks", help="numbers of ranks, each measured (default: 1,2; with a single GPU 1)")
    add_option(parser, "--width", type=int, default=768, help="of the hidden layers")
    add_option(parser, "--layers", type=int, default=4, help="of 8 width^2 parameters each")
    add_option(parser, "--tokens", type=int, default=256, help="per rank and step")
    add_option(parser, "--rounds", type=int, default=8, help="turns of each contestant")
    add_option(parser, "--steps", type=int, default=3, help="per turn")
    add_option(parser, "--clip", default="off,0.05", help='thresholds of the norm, or "off"')
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--threads", type=int, help="worker threads per rank (default: the rank's share of cores)")
    parser.add_argument("--json", metavar="PATH", help="write machine, versions and rows to this file")
    parser.add_argument("--plot", metavar="PATH", help="draw a PNG")
    parser.add_argument(
        "--check",
        action="store_true",
        help="exit with 1 if ours is slower, or its optimizer part not 1.4 x faster",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    clips = [_threshold(text) for text in args.clip.split(",")]
    asked = None if args.ranks is None else _whole_numbers("ranks", args.ranks)
    for name in ("width", "layers", "tokens", "rounds", "steps"):
        if getattr(args, name) < 1:
            raise ArgumentError(f"--{name} {getattr(args, name)}: expected at least 1")
    if find_spec("deepspeed") is None:
        raise ArgumentError("deepspeed is not installed; pip install deepspeed==0.19.8")
    from benchmarks.zero3.report import holds, line, plot, rows_of
    from benchmarks.zero3.steps import UPSTREAM, Workload, check_ranks, default_ranks, measure, on_gpus

    ranks = asked or default_ranks()
    for count in ranks:
        check_ranks(count)
    facts = command.begin(args)
    rows: list[dict[str, Any]] = []
    contestants = (*Workload.contestants, *([UPSTREAM] if on_gpus() else []))
    sizes = (args.width, args.layers, args.tokens, args.rounds, args.steps)
    for count in ranks:
        for clip in clips:
            workload = Workload(*sizes, clip, args.precision, args.threads, contestants)
            found = rows_of(workload, count, measure(workload, count))
            print("\n".join(map(line, found)), flush=True)
            rows += found
    facts["versions"]["deepspeed"] = metadata.version("deepspeed")
    report = {
        **facts,
        "limit": None,
        "rows": rows,
        "not_measured": [] if on_gpus() else [f"{UPSTREAM}, which needs a CUDA device"],
    }
    command.write(args, report, lambda path: plot(rows, path))
    return 0 if not args.check or holds(rows) else 1


def _whole_numbers(name: str, text: str) -> list[int]:
    if not all(part.isdigit() and int(part) > 0 for part in text.split(",")):
        raise ArgumentError(f"--{name} {text!r}: expected whole numbers of at least 1, such as 1,2")
    return [int(part) for part in text.split(",")]


def _threshold(text: str) -> float:
    """Parses a threshold; 0 stands for no clipping, as in DeepSpeed's config."""
    try:
        value = 0.0 if text == "off" else float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < float("inf"):
        raise ArgumentError(f'--clip {text!r}: expected positive numbers or "off", such as off,1.0')
    return value


if __name__ == "__main__":
    raise SystemExit(command.start(make_parser(), run))
