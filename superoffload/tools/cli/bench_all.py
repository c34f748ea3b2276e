"""`superoffload bench all`: runs `python -m benchmarks.all` of the checkout that this package lies in."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from superoffload.errors import SuperOffloadError

_CHECKOUT = Path(__file__).resolve().parents[3]


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    # No argument begins with a NUL, so argparse takes none for an option: all of them are handed on as they are.
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "all", help="everything that can be measured here (in a checkout)", add_help=False, prefix_chars="\0"
    )
    parser.add_argument("arguments", nargs="*")
    return parser


def run(args: argparse.Namespace) -> int:
    if not (_CHECKOUT / "benchmarks" / "all.py").is_file():
        raise SuperOffloadError(
            "bench all: the installed package does not have it; clone the repository, build it there (make build), "
            "and start it there: python -m benchmarks.all --out DIR. The other benchmarks work here, each by itself: "
            "superoffload bench --help lists them"
        )
    if str(_CHECKOUT) not in sys.path:
        sys.path.insert(0, str(_CHECKOUT))
    return int(import_module("benchmarks.all").main(args.arguments))
