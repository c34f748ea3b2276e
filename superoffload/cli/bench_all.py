"""`superoffload bench all`: everything that can be measured on this machine, in one command that can be continued."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from superoffload.cli import measurement
from superoffload.errors import ArgumentError


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "all",
        help="everything that can be measured here",
        description="Runs every benchmark in a process of its own and writes DIR/all.json, DIR/all.html and "
        "DIR/all.log, which has all that they print. What is there already, made with the same sources, is not "
        "measured again. Exits with 0 once all has been measured or cannot be measured here, 1 if something failed, "
        "3 if something is left for another call.",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="results; the same folder continues")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that everything works")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these benchmarks")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="of this call (default: none)")
    parser.add_argument("--retry", action="store_true", help="try again what failed or took too long before")
    parser.add_argument("--quiet", action="store_true", help="no progress, only the result")
    return parser


def run(args: argparse.Namespace) -> int:
    if args.time_limit is not None and not args.time_limit > 0:
        raise ArgumentError(f"time_limit={args.time_limit}: expected a positive number of seconds")
    names = _names(args.only)
    import torch

    from superoffload.benchmarking import everything
    from superoffload.benchmarking.jobs import LEFT, Results, run_jobs
    from superoffload.reporting.run_folder import naming_write_errors

    folder = Path(args.out)
    results = Results(folder, "all.json")
    jobs = everything.all_jobs(names, folder, quick=args.quick, cuda=torch.cuda.is_available())
    limit = float("inf") if args.time_limit is None else args.time_limit
    left = [job.key for job in run_jobs(jobs, results, limit, measurement.progress(args), retry=args.retry)]
    report = results.merge(jobs, {"command": args.command_line, "quick": args.quick, "left": left})
    page = folder / "all.html"
    with naming_write_errors(page):
        page.write_text(everything.page(report, folder, left), encoding="utf-8")
    print(everything.summary(report["rows"]))
    if args.quick:
        print("small sizes: these figures show that it works, and nothing else")
    print(f"{page}")
    if left:
        print(f"left for another call: {', '.join(left)}")
        return LEFT
    return 1 if any(everything.is_wrong(row) for row in report["rows"]) else 0


def _names(only: list[str] | None) -> list[str]:
    from superoffload.cli.bench import BENCHMARKS

    known = [*(name for name in BENCHMARKS if name != "all"), "gpu_suite"]
    unknown = [name for name in only or () if name not in known]
    if unknown:
        raise ArgumentError(f"only={unknown[0]}: expected some of {', '.join(known)}")
    return [name for name in known if only is None or name in only]
