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
        "after it imports deepspeed. Its config decides the rest. The exit status is that of the command.",
        epilog="examples:\n"
        "  superoffload run -- deepspeed --num_gpus 4 train.py --deepspeed ds.json\n"
        "  superoffload run -- torchrun --nproc-per-node 4 train.py\n"
        "  superoffload run -- accelerate launch train.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--take-over", action="store_true", help='also where a config has "device": "cpu", unchanged')
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="what to run")
    return parser


def run(args: argparse.Namespace) -> int:
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise ArgumentError("run: no command; expected one, such as: superoffload run -- torchrun train.py")
    if find_spec("deepspeed") is None:
        print("superoffload: warning: this Python has no deepspeed, so run changes nothing in it", file=sys.stderr)
    replace_process(command, {TAKE_OVER: "1"} if args.take_over else {})


def replace_process(command: list[str], more: Mapping[str, str]) -> NoReturn:
    """Becomes the command, so that signals and the exit status are its own."""
    if shutil.which(command[0]) is None:
        raise ArgumentError(f"run: {command[0]}: not found or not executable; expected a program on PATH or its path")
    try:
        os.execvpe(command[0], command, environment({**os.environ, **more}))
    except (OSError, ValueError) as error:  # no #! line, for another processor, interpreter missing, arguments too long
        why = getattr(error, "strerror", None) or str(error)
        raise ArgumentError(
            f"run: {command[0]}: cannot be started ({why}); expected a program: give a script its #! line, or name its "
            f"interpreter, such as: superoffload run -- python {command[0]}"
        ) from error


def environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Puts our ``sitecustomize`` first in PYTHONPATH; it finds superoffload, and nothing else beside it."""
    path = filter(None, (str(_INJECT), inherited.get("PYTHONPATH")))
    return {**inherited, "PYTHONPATH": os.pathsep.join(path)}
