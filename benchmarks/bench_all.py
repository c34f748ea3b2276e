"""`superoffload bench all`: runs `python -m benchmarks.all`."""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks import all as every_benchmark


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Takes every argument as it is: benchmarks.all has a parser of its own."""
    parser: argparse.ArgumentParser = subparsers.add_parser("all", add_help=False, prefix_chars="\0")
    parser.add_argument("arguments", nargs="*")
    return parser


def run(args: argparse.Namespace) -> int:
    return every_benchmark.main(args.arguments)
