"""Provides what all benchmarks share as commands: parser, facts beside the figures, progress, JSON, picture, status."""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.report import facts, write_results
from superoffload.errors import ArgumentError, SuperOffloadError
from superoffload.tools.output import add_option, check_writable

__all__ = ["add_option", "parser", "positive", "say", "start"]

Report = dict[str, Any]


def parser(name: str, description: str, *, plot: bool = True) -> argparse.ArgumentParser:
    """Returns the parser of ``python -m benchmarks.NAME``, with the options that all benchmarks have."""
    made = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    made.add_argument("--quick", action="store_true", help="little of everything: shows that it works, nothing else")
    made.add_argument("--json", metavar="PATH", help="write machine, versions, commit and rows to this file")
    if plot:
        made.add_argument("--plot", metavar="PATH", help="draw a PNG")
    return made


def positive(args: argparse.Namespace, *names: str) -> None:
    """Raises for options, or lists of them, with a value that is not positive."""
    for name in names:
        value = getattr(args, name)
        if not all(each > 0 for each in (value if isinstance(value, (list, tuple)) else [value])):
            raise ArgumentError(f"{name}={value}: expected a positive number")


def say(text: str) -> None:
    """Shows progress."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def clock(name: str) -> Iterator[None]:
    """Says every 15 seconds how long a benchmark has been running: some print their figures at the end."""
    over, began = threading.Event(), time.monotonic()

    def tick() -> None:
        while not over.wait(15):
            say(f"{name}: {time.monotonic() - began:.0f} s so far")

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def start(
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace], Report],
    plot: Callable[[Report, Path], None] | None = None,
) -> int:
    """Runs a benchmark, writes JSON and picture; returns its exit status.

    ``run`` returns ``rows`` and whatever else belongs into the JSON. ``missed``: promises that the figures break; then
    the status is 1. It is 2 for arguments that ``run`` refuses.
    """
    if "OMP_WAIT_POLICY" not in os.environ:  # read when torch is loaded, which it is
        # Threads of torch that spin while they wait would take the processors of the optimizer's worker threads.
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.execv(sys.executable, sys.orig_argv)
    args = parser.parse_args()
    picture = getattr(args, "plot", None)
    try:
        check_writable(args.json, "json")
        check_writable(picture, "plot")
        report: Report = {**facts(), "command": [*parser.prog.split(), *sys.argv[1:]]}
        with clock(parser.prog):
            report |= run(args)
        if args.json:
            write_results(args.json, report)
    except SuperOffloadError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ArgumentError) else 1
    if picture and plot is not None:
        if find_spec("matplotlib") is None:
            say("matplotlib is not installed, so no plot was drawn: pip install 'superoffload[demo]'")
        else:
            plot(report, Path(picture))
    missed = report.get("missed", [])
    print("".join(f"missed: {each}\n" for each in missed), end="", file=sys.stderr)
    return 1 if missed else 0
