"""Provides what measuring commands share: facts above the figures, progress, and output files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from superoffload.errors import ArgumentError


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
    from superoffload.tools.report.machine_facts import benchmark_machine_facts, commit, version_facts
    from superoffload.tools.report.run_folder import check_writable

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
    from superoffload.tools.report.plots import PLOT_HINT, matplotlib_installed
    from superoffload.tools.report.run_folder import write_json

    if args.json:
        write_json(args.json, report)
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
