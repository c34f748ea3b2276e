"""Runs `superoffload run -- COMMAND`: a DeepSpeed script with superoffload enabled and nothing edited."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from superoffload.errors import ArgumentError
from superoffload.host.environment import TAKE_OVER

_INJECT = Path(__file__).resolve().parents[1] / "integrations" / "deepspeed" / "inject"


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "run",
        help="run a DeepSpeed script with superoffload, without touching it",
        description="Runs a command in which every Python calls superoffload.integrations.deepspeed.enable() right\n"
        'after it imports deepspeed. The config decides the rest: "offload_optimizer": {"device": "superoffload"} or\n'
        '{"device": "cpu", "super_offload": true}. The exit status is that of the command.',
        epilog="examples:\n"
        "  superoffload run -- deepspeed --num_gpus 4 train.py --deepspeed ds.json\n"
        "  superoffload run -- torchrun --nproc-per-node 4 train.py\n"
        "  superoffload run -- accelerate launch train.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--take-over",
        action="store_true",
        help='also run DeepSpeed configs with its own "device": "cpu" with superoffload',
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="what to run")
    return parser


def run(args: argparse.Namespace) -> int:
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise ArgumentError("run: no command; expected one, such as: superoffload run -- torchrun train.py")
    if find_spec("deepspeed") is None:
        print(
            "superoffload: warning: this Python has no deepspeed; run changes DeepSpeed programs only", file=sys.stderr
        )
    replace_process(command, take_over=args.take_over)


def replace_process(command: list[str], *, take_over: bool = False) -> NoReturn:
    """Becomes the command, so that signals and the exit status are its own."""
    if shutil.which(command[0]) is None:
        raise ArgumentError(f"run: {command[0]}: not found or not executable; expected a program on PATH or its path")
    try:
        os.execvpe(command[0], command, environment(os.environ, take_over=take_over))
    except (OSError, ValueError) as error:  # no #! line, for another processor, interpreter missing, arguments too long
        why = getattr(error, "strerror", None) or str(error)
        raise ArgumentError(
            f"run: {command[0]}: cannot be started ({why}); expected a program: give a script its #! line, or name its "
            f"interpreter, such as: superoffload run -- python {command[0]}"
        ) from error


def environment(inherited: Mapping[str, str], *, take_over: bool = False) -> dict[str, str]:
    """Puts our ``sitecustomize`` first in PYTHONPATH; it finds superoffload, and nothing else beside it."""
    path = filter(None, (str(_INJECT), inherited.get("PYTHONPATH")))
    asked = {TAKE_OVER: "1"} if take_over else {}
    return {**inherited, **asked, "PYTHONPATH": os.pathsep.join(path)}
