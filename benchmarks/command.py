"""Provides what the benchmarks share as commands: parser, exit status, facts above the figures, progress, output."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from superoffload.errors import ArgumentError, SuperOffloadError


def parser(name: str, *, description: str) -> argparse.ArgumentParser:
    """Returns the parser of ``python -m benchmarks.NAME``."""
    return argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)


def start(
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace], int],
    arguments: Sequence[str] | None = None,
) -> int:
    """Runs a benchmark; returns its exit status: 2 for arguments that it refuses, 1 where it fails."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    # Threads of torch that spin while they wait would take the processors of the optimizer's worker threads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    args = parser.parse_args(given, argparse.Namespace(command_line=[*parser.prog.split(), *given]))
    try:
        return run(args)
    except SuperOffloadError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ArgumentError) else 1


def add_output_options(parser: argparse.ArgumentParser, *, facts: str = "machine, versions and rows") -> None:
    """Adds the options for output. ``facts``: the contents of the JSON."""
    parser.add_argument("--json", metavar="PATH", help=f"write {facts} to this file")
    parser.add_argument("--plot", metavar="PATH", help="draw a PNG")
    parser.add_argument("--quiet", action="store_true", help="no progress, only the result")


def check_at_least(args: argparse.Namespace, least: int, *names: str) -> None:
    """Raises for options with a smaller value."""
    for name in names:
        if getattr(args, name) < least:
            raise ArgumentError(f"{name}={getattr(args, name)}: expected at least {least}")


def begin(args: argparse.Namespace) -> dict[str, Any]:
    """Checks that results can be written and returns the facts that a reader needs beside them."""
    from benchmarks.facts import benchmark_machine_facts, commit, version_facts
    from superoffload.tools.output import check_writable

    check_writable(args.json, "json")
    check_writable(_plot_path(args), "plot")
    return {
        "machine": benchmark_machine_facts(),
        "versions": version_facts(),
        "commit": commit(),
        "command": args.command_line,
    }


def progress(args: argparse.Namespace) -> Callable[[str], None]:
    """Returns a function that shows a line, unless --quiet was given."""

    def show(text: str) -> None:
        if not args.quiet:
            print(text, file=sys.stderr, flush=True)

    return show


def write(args: argparse.Namespace, report: dict[str, Any], plot: Callable[[Path], None] | None = None) -> None:
    """Writes the requested JSON and plot."""
    from benchmarks.plots import PLOT_HINT, matplotlib_installed
    from benchmarks.results_file import write_results

    if args.json:
        write_results(args.json, report)
    path = _plot_path(args)
    if path is None or plot is None:
        return
    if matplotlib_installed():
        plot(Path(path))
    else:
        print(PLOT_HINT, file=sys.stderr)


def _plot_path(args: argparse.Namespace) -> str | None:
    """Returns the requested plot's path; some commands have no such option."""
    path: str | None = getattr(args, "plot", None)
    return path
