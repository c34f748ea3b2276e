"""Runs what has no result yet, keeps every result as it comes, prints one table: python -m benchmarks.gpu_suite."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.commands import (
    add_options,
    check_common,
    describe_left,
    out_folder,
    prepare,
    run_command,
    say,
    show_failed_preparations,
    status_of,
)
from superoffload.errors import ArgumentError

NAME = "gpu_suite.json"
SLOTS = ("first", "second", "third", "superchip")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_suite",
        description="Training steps on one GPU: ours, everything on the GPU, and peers. A call ends within its time "
        "limit, and the next one goes on where it ended. Exits with 0 once everything has been tried, 3 if something "
        "is left for another call, 1 if smoke, a GPU test, a race or a row of ours failed.",
    )
    add_options(parser, time_limit=540.0)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N; with --toy also cpu or stand-in")
    parser.add_argument("--slot", choices=SLOTS, default="first", help="which measurements (default: first)")
    parser.add_argument("--row-limit", type=float, default=120.0, metavar="SECONDS", help="of one row (default: 120)")
    parser.add_argument("--contestants", nargs="+", metavar="NAME", help="rows of these instead (see --list)")
    parser.add_argument("--tokens", type=int, nargs="+", metavar="N", help="rows with these tokens per step instead")
    parser.add_argument("--capped", action="store_true", help="these rows with the GPU's memory capped")
    parser.add_argument("--without-tests", action="store_true", help="do not run tests/gpu")
    parser.add_argument("--json", metavar="PATH", help=f"write the results to this file too (DIR/{NAME})")
    parser.add_argument("--ranks", type=int, nargs="+", metavar="N", help="GPUs of the superchip slot")
    parser.add_argument("--list", action="store_true", help="show the contestants and what is left to do, and end")
    parser.add_argument(
        "--report", metavar="JSON", help="measure nothing: show all of this file; with --json, write there what was "
        "made with this checkout's sources, with its commit",
    )  # fmt: skip
    parser.add_argument("--plot", metavar="PATH", help="with --report: draw its rows of the latest commit")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    return run_command("gpu_suite", _run, parse(arguments))


def _run(args: argparse.Namespace) -> int:
    if args.report:
        from benchmarks.gpu_suite.publish import report

        target, picture = (Path(path) if path else None for path in (args.json, args.plot))
        return report(Path(args.report), target, picture)
    _check(args)
    began = time.monotonic()
    out = out_folder(args)
    log = (out / NAME).with_suffix(".log")
    error = prepare(args, log, builds=args.device != "cpu" and not args.list)
    if error is not None:
        say(f"nothing was measured: {error}")
        return 1
    return _measure(args, out, log, began)


def _measure(args: argparse.Namespace, out: Path, log: Path, began: float) -> int:
    from benchmarks.gpu_suite.contestants import FILES_VARIABLE
    from benchmarks.gpu_suite.rows import all_jobs
    from benchmarks.gpu_suite.smoke import sanitizer
    from benchmarks.gpu_suite.table import descriptions, short_table
    from benchmarks.gpu_suite.targets import all_targets, is_wrong
    from benchmarks.jobs import Results, plain, run_jobs
    from benchmarks.results_file import write_results
    from superoffload.tools.output import check_writable

    check_writable(args.json, "json")
    jobs = all_jobs(_plan(args))
    results = Results(out, NAME, earlier=Path(args.resume) if args.resume else None, log=log)
    if args.list:
        print(descriptions())
        print("\n".join(f"left: {job.key}" for job in jobs if results.row(job) is None))
        return 0
    files = {FILES_VARIABLE: str(out.resolve())}
    if args.device.startswith("cuda") and not args.without_sanitizer and sanitizer() is None:
        say("compute-sanitizer is not installed: smoke runs without it")
    remaining = args.time_limit - (time.monotonic() - began)
    left = run_jobs(jobs, results, remaining, say, retry=args.retry, environment=files)
    targets = all_targets(results.rows(jobs))
    found = {"left": [job.key for job in left], "targets": [target.as_json() for target in targets]}
    report = results.merge(jobs, {"command": sys.argv, "slot": args.slot, "gpu": _gpu(results.rows(jobs)), **found})
    if args.json:
        write_results(args.json, plain(report))
    show_failed_preparations(jobs, results)
    said, goes_on = describe_left(jobs, left, results)
    print("\n".join([short_table(report["rows"], targets), *said]))
    return status_of(args, left, goes_on=goes_on, failed=any(map(is_wrong, report["rows"])))


def _check(args: argparse.Namespace) -> None:
    check_common(args, NAME)
    if not args.row_limit > 0:
        raise ArgumentError(f"row_limit={args.row_limit}: expected a positive number of seconds")
    if args.plot:
        raise ArgumentError(f"plot={args.plot}: expected --report JSON beside it, whose rows are drawn")
    if args.capped and not (args.contestants or args.tokens):
        raise ArgumentError("capped: expected --contestants or --tokens beside it; the third slot has capped rows")
    if args.ranks and (args.slot != "superchip" or min(args.ranks) < 1):
        raise ArgumentError(f"ranks={args.ranks}: expected numbers of GPUs from 1 on, with --slot superchip")
    if args.slot == "superchip" and (args.tokens or args.capped):
        raise ArgumentError("slot=superchip: its rows have tokens of their own; leave out --tokens and --capped")
    if args.device == "stand-in" and not args.toy:
        raise ArgumentError("device=stand-in: it shows that the suite works and no times; add --toy")


def _plan(args: argparse.Namespace) -> Any:
    from benchmarks.gpu_suite.contestants import CONTESTANTS
    from benchmarks.gpu_suite.rows import PUBLISHED, Plan
    from benchmarks.gpu_suite.settings import FULL, TOY

    known = PUBLISHED if args.slot == "superchip" else tuple(CONTESTANTS)  # the others train on one GPU each
    unknown = [name for name in args.contestants or () if name not in known]
    if unknown:
        raise ArgumentError(f"contestants={unknown[0]}: expected some of {', '.join(known)}")
    return Plan(
        device=args.device,
        size=TOY if args.toy else FULL,
        toy=args.toy,
        slot=args.slot,
        contestants=tuple(args.contestants) if args.contestants else None,
        tokens=tuple(args.tokens) if args.tokens else None,
        capped=args.capped,
        ranks=tuple(args.ranks) if args.ranks else None,
        row_seconds=args.row_limit,
        sanitized=not args.without_sanitizer,
        tests=not args.without_tests,
    )


def _gpu(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Returns name, memory, CUDA version and packages, from the smoke row; None on a CPU."""
    smoke: dict[str, Any] = next((row["result"] for row in rows if row["key"] == "smoke" and row.get("result")), {})
    names = ("device", "gpu_memory_bytes", "cuda", "versions")
    return {name: smoke[name] for name in names} if "gpu_memory_bytes" in smoke else None


if __name__ == "__main__":
    raise SystemExit(main())
