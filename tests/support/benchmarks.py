"""The benchmarks as commands, in this process."""

from __future__ import annotations

import argparse
from importlib import import_module

from benchmarks import command


def parser_of(name: str) -> argparse.ArgumentParser:
    """That of `python -m benchmarks.NAME`."""
    parser: argparse.ArgumentParser = import_module(f"benchmarks.{name}.__main__").make_parser()
    return parser


def bench(name: str, *arguments: str) -> int:
    """The exit status of `python -m benchmarks.NAME ARGUMENTS`."""
    return command.start(parser_of(name), import_module(f"benchmarks.{name}.__main__").run, arguments)
