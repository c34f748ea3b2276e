"""Runs `python -m benchmarks.all` for `superoffload bench all`."""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks import all as every_benchmark


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Accepts every argument as it is: benchmarks.all has its own parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser("all", add_help=False, prefix_chars="\0")
    parser.add_argument("arguments", nargs="*")
    return parser


def run(args: argparse.Namespace) -> int:
    return every_benchmark.main(args.arguments)
