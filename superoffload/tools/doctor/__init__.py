"""Examines for `superoffload doctor` what this machine and installation can do, what is in the way, and what to do."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor",
        help="examine this machine and this installation",
        description="Examine processors, memory, GPU, Superchip settings and software, measure memory bandwidth for\n"
        "about a second, and undo a speculated step on every instruction set of this machine.\n"
        "Every finding is ok, a warning or a problem, with what to do. Exits with 1 only if one is a problem.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", metavar="PATH", help="write facts and findings to this file too")
    parser.add_argument("--no-bandwidth", action="store_true", help="do not measure memory bandwidth")
    parser.add_argument(
        "--root", metavar="PATH", default="/", help="read /proc and /sys below this folder, such as a copy of them"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    from superoffload.errors import ArgumentError
    from superoffload.host.system import System
    from superoffload.tools.doctor.examine import diagnose
    from superoffload.tools.output import check_writable, write_json

    if not Path(args.root).is_dir():
        raise ArgumentError(f"root={args.root}: no such folder; expected one that holds proc and sys")
    check_writable(args.json, "json")
    diagnosis = diagnose(System(Path(args.root)), measure_bandwidth=not args.no_bandwidth)
    print(diagnosis.text())
    if args.json:
        write_json(args.json, diagnosis.as_json())
    return 0 if diagnosis.passed else 1
