"""Defines the `superoffload` command: one module per subcommand, with `add_parser(subparsers)` and `run(args) -> int`.

Command modules import torch only when they run, so that help, `--version` and argument errors are immediate.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module

from superoffload import __version__
from superoffload.errors import ArgumentError, SuperOffloadError, printable, shown
from superoffload.tools.output import meant

COMMANDS = ("verify", "doctor", "plan", "run")
EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130


def build_parser() -> argparse.ArgumentParser:
    about = "AdamW in host memory that steps during backward, with exact results."
    parser = argparse.ArgumentParser(prog="superoffload", description=about)
    parser.add_argument("--version", action="version", version=f"superoffload {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name in COMMANDS:
        command = import_module(f"superoffload.tools.{name}")
        added = command.add_parser(subparsers)
        added.set_defaults(run=command.run, usage=added.format_usage())
    return parser


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Reads the command line, and says what was meant by a command or an option that does not exist."""
    word = arguments[0] if arguments else "-"
    if word[:1] != "-" and word not in COMMANDS:
        raise ArgumentError(f"{shown(word)}: {meant(word, COMMANDS)}expected a command: {', '.join(COMMANDS)}")
    given = argparse.Namespace(command_line=["superoffload", *arguments], usage="", stray="")
    args, unknown = build_parser().parse_known_args(arguments, given)
    for word in unknown:
        hint = f"did you mean {args.stray} {word}? " if args.stray and word[:1] != "-" else ""
        hint = hint or meant(word.partition("=")[0], re.findall(r"--[\w-]+", args.usage))
        raise ArgumentError(f"{shown(word)}: {hint}expected what --help lists")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; the exit status is 0 only if everything the command says it checked holds."""
    _let_waiting_threads_sleep()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        args = parse(arguments)
        if "run" in args:
            return int(args.run(args))
        build_parser().print_help(sys.stderr)
        return EXIT_USAGE
    except SuperOffloadError as error:
        return _fail(str(error), EXIT_USAGE if isinstance(error, ArgumentError) else EXIT_FAILED)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not re.search("allocate memory|out of memory", str(error)):
            raise
        what = str(error).partition("\n")[0].rstrip(".") or "an allocation failed"
        return _fail(f"not enough memory: {what}; choose smaller sizes (model, batch, sequence)", EXIT_FAILED)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "numpy"):
            raise
        return _fail(f"{error.name} is not installed, which this command needs: pip install {error.name}", EXIT_FAILED)
    except KeyboardInterrupt:
        return _fail("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader went away (`| head`). Point stdout elsewhere, or flushing it at exit fails again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _let_waiting_threads_sleep() -> None:
    """Lets torch's waiting OpenMP threads sleep, unless the user chose otherwise: by default they spin where the worker
    threads run, and a step may take ten times as long. OpenMP reads the variable when torch is loaded."""
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _fail(message: str, status: int) -> int:
    print("superoffload: error: " + printable(" ".join(message.split())), file=sys.stderr)
    return status
