"""Runs `superoffload bench`: measurements that give ratios within one run, as JSON, a table and a plot.

The package has those about a user's own machine. Those about the project are in benchmarks/ of a checkout, and the same
command runs them there.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from types import ModuleType
from typing import Any

from superoffload.tools.cli.checkout import of_checkout

INSTALLED = ("adam", "link", "state", "tensors")
IN_CHECKOUT = {
    "all": "everything that can be measured here",
    "deepspeed": "ZeRO-3 steps, stock and ours",
    "journal": "the size of the undo journal in training",
    "memory": "resident memory, and what stats() and plan say",
    "ranks": "the cost of the rank checks",
    "schedule": "speculating, one pass, two phases, adaptive",
}
BENCHMARKS = tuple(sorted((*INSTALLED, *IN_CHECKOUT)))


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "bench", help="measure on this machine", description="Measurements: ratios within one run, as JSON and plots."
    )
    benchmarks = parser.add_subparsers(title="benchmarks", metavar="WHAT", required=True)
    for name in BENCHMARKS:
        if name in INSTALLED:
            benchmark = import_module(f"superoffload.tools.cli.bench_{name}")
            benchmark.add_parser(benchmarks).set_defaults(benchmark=benchmark.run)
        else:
            _add_stand_in(benchmarks, name)
    return parser


def run(args: argparse.Namespace) -> int:
    return int(args.benchmark(args))


def _add_stand_in(subparsers: Any, name: str) -> None:
    """Adds a parser that hands on all arguments: none begins with a NUL, so argparse takes none for an option."""
    parser = subparsers.add_parser(name, help=f"{IN_CHECKOUT[name]} (in a checkout)", add_help=False, prefix_chars="\0")
    parser.add_argument("arguments", nargs="*")
    parser.set_defaults(benchmark=_run_of_checkout, name=name)


def _run_of_checkout(args: argparse.Namespace) -> int:
    handed_on = argparse.Namespace(command_line=args.command_line)
    inner = parser_of_checkout(args.name).parse_args(args.arguments, handed_on)
    return int(_of_checkout(args.name).run(inner))


def parser_of_checkout(name: str) -> argparse.ArgumentParser:
    """Returns the parser of a benchmark in the checkout; without a checkout raises an error that says what to do."""
    subparsers = argparse.ArgumentParser(prog="superoffload bench").add_subparsers()
    parser: argparse.ArgumentParser = _of_checkout(name).add_parser(subparsers)
    return parser


def _of_checkout(name: str) -> ModuleType:
    command = "python -m benchmarks.all --out DIR" if name == "all" else f"python -m superoffload bench {name}"
    return of_checkout(f"bench_{name}", f"bench {name}", command)
