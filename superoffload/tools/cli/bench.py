"""`superoffload bench`: measurements that give ratios within one run, as JSON, a table and a plot."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

BENCHMARKS = ("adam", "all", "deepspeed", "journal", "link", "ranks", "schedule", "state", "tensors")


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "bench", help="measure on this machine", description="Measurements: ratios within one run, as JSON and plots."
    )
    benchmarks = parser.add_subparsers(title="benchmarks", metavar="WHAT", required=True)
    for name in BENCHMARKS:
        benchmark = import_module(f"superoffload.tools.cli.bench_{name}")
        benchmark.add_parser(benchmarks).set_defaults(benchmark=benchmark.run)
    return parser


def run(args: argparse.Namespace) -> int:
    return int(args.benchmark(args))
