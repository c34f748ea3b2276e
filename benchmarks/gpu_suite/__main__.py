"""Runs what has no result yet, keeps every result as it comes, prints one table: python -m benchmarks.gpu_suite."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_suite.bare_machine import CARRIED, prepare
from superoffload.errors import ArgumentError, SuperOffloadError
from superoffload.tools.output import naming_write_errors

NAME = "gpu_suite.json"
SLOTS = ("first", "second", "third", "superchip")
_LEFT = 3  # exit status
_SHOWN_LINES, _SHOWN_WIDTH = 25, 160  # of a failed preparation's output


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_suite",
        description="Training steps on one GPU: ours, everything on the GPU, and peers. A call ends within its time "
        "limit, and the next one goes on where it ended. Exits with 0 once everything has been tried, 3 if something "
        "is left for another call, 1 if smoke, a GPU test, a race or a row of ours failed.",
    )
    parser.add_argument("--out", metavar="DIR", help="results and log; the same folder continues")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N; with --toy also cpu or stand-in")
    parser.add_argument("--toy", action="store_true", help="sizes at which nothing is learned, to try that all works")
    parser.add_argument("--slot", choices=SLOTS, default="first", help="which measurements (default: first)")
    parser.add_argument(
        "--time-limit", type=float, default=540.0, metavar="SECONDS", help="of this call (default: 540)"
    )
    parser.add_argument("--retry", action="store_true", help="try again what failed or took too long before")
    parser.add_argument("--contestants", nargs="+", metavar="NAME", help="rows of these instead (see --list)")
    parser.add_argument("--tokens", type=int, nargs="+", metavar="N", help="rows with these tokens per step instead")
    parser.add_argument("--capped", action="store_true", help="these rows with the GPU's memory capped")
    parser.add_argument("--ranks", type=int, nargs="+", metavar="N", help="GPUs of the superchip slot")
    parser.add_argument("--list", action="store_true", help="show the contestants and what is left to do, and end")
    parser.add_argument("--report", metavar="JSON", help="measure nothing: show all of this file")
    parser.add_argument("--json", metavar="PATH", help="with --report: write there what this checkout's sources made")
    parser.add_argument("--plot", metavar="PATH", help="with --report: draw its rows of the latest commit")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    try:
        return _report(args) if args.report else _measure(args)
    except SuperOffloadError as error:
        print(f"gpu_suite: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ArgumentError) else 1


def _report(args: argparse.Namespace) -> int:
    from benchmarks.gpu_suite.publish import report

    target, picture = (Path(path) if path else None for path in (args.json, args.plot))
    return report(Path(args.report), target, picture)


def _measure(args: argparse.Namespace) -> int:
    _check(args)
    began, path = time.monotonic(), Path(args.out, NAME)
    with naming_write_errors(args.out):
        path.parent.mkdir(parents=True, exist_ok=True)
    on_gpu = args.device.startswith("cuda")
    wheels = CARRIED / "wheels" if on_gpu and any(CARRIED.glob("wheels/*.whl")) else None
    error = prepare(path.parent, path.with_suffix(".log"), wheels, builds=args.device != "cpu" and not args.list)
    if error is not None:
        print(f"nothing was measured: {error}")
        return 1
    # These need the extension and torch.
    from benchmarks.gpu_suite.contestants import CONTESTANTS, FILES_VARIABLE
    from benchmarks.gpu_suite.jobs import Results, run_jobs
    from benchmarks.gpu_suite.rows import all_jobs
    from benchmarks.gpu_suite.table import short_table
    from benchmarks.gpu_suite.targets import all_targets, is_wrong

    jobs = all_jobs(_plan(args))
    results = Results(path, earlier=CARRIED / NAME if on_gpu else None)
    if args.list:
        print("\n".join(f"  {name:<38}{entry.kind:<7}{entry.text}" for name, entry in CONTESTANTS.items()))
        print("\n".join(f"left: {job.key}" for job in jobs if results.row(job) is None))
        return 0
    files = {FILES_VARIABLE: str(path.parent.resolve())}
    left = run_jobs(jobs, results, args.time_limit - (time.monotonic() - began), retry=args.retry, environment=files)
    rows = results.rows(jobs)
    targets = all_targets(rows)
    found = {"left": [job.key for job in left], "targets": [target.as_json() for target in targets]}
    results.merge(jobs, {"command": sys.argv, "slot": args.slot, "gpu": _gpu(rows), **found})
    _show_failed_preparations(jobs, results)
    said, goes_on = _describe_left(jobs, left, results)
    print("\n".join([short_table(rows, targets), *said]))
    if args.toy:
        print("toy sizes: these figures show that it works, and nothing else")
    if any(map(is_wrong, rows)) or not goes_on:  # a failure matters more than what is left
        return 1
    return _LEFT if left else 0


def _check(args: argparse.Namespace) -> None:
    if not args.out:
        raise ArgumentError("out: expected --out DIR, a folder for results and log")
    if not args.time_limit > 0:
        raise ArgumentError(f"time_limit={args.time_limit}: expected a positive number of seconds")
    if args.device in ("cpu", "stand-in") and not args.toy:
        raise ArgumentError(f"device={args.device}: it shows that the suite works and no times; add --toy")
    if args.plot or args.json:
        raise ArgumentError("plot, json: expected --report JSON beside it, whose rows are drawn or written")
    if args.capped and not (args.contestants or args.tokens):
        raise ArgumentError("capped: expected --contestants or --tokens beside it; the third slot has capped rows")
    if args.ranks and (args.slot != "superchip" or min(args.ranks) < 1):
        raise ArgumentError(f"ranks={args.ranks}: expected numbers of GPUs from 1 on, with --slot superchip")
    if args.slot == "superchip" and (args.tokens or args.capped):
        raise ArgumentError("slot=superchip: its rows have tokens of their own; leave out --tokens and --capped")


def _plan(args: argparse.Namespace) -> Any:
    from benchmarks.gpu_suite.contestants import CONTESTANTS
    from benchmarks.gpu_suite.rows import PUBLISHED, Plan

    known = PUBLISHED if args.slot == "superchip" else tuple(CONTESTANTS)  # the others train on one GPU each
    unknown = [name for name in args.contestants or () if name not in known]
    if unknown:
        raise ArgumentError(f"contestants={unknown[0]}: expected some of {', '.join(known)}")
    return Plan(args.device, args.toy, args.slot, args.contestants, args.tokens, args.capped, args.ranks)


def _gpu(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Returns name, memory, CUDA version and packages, from the smoke row; None on a CPU."""
    smoke: dict[str, Any] = next((row["result"] for row in rows if row["key"] == "smoke" and row.get("result")), {})
    names = ("device", "gpu_memory_bytes", "cuda", "versions")
    return {name: smoke[name] for name in names} if "gpu_memory_bytes" in smoke else None


# ---- the end ---------------------------------------------------------------------------------------------------------


def _describe_left(jobs: Sequence[Any], left: Sequence[Any], results: Any) -> tuple[list[str], bool]:
    """Returns lines about the jobs left and why, and whether another call of the same command would make progress."""
    blocked = {job.key: _blocked_by(job, jobs, results) for job in left}
    counts = Counter(why for why in blocked.values() if why)
    said = [f"{count} of {len(jobs)} wait for {why}" for why, count in counts.items()]
    waiting = [job.needed_seconds for job in left if not blocked[job.key]]
    if waiting:
        least = f"(a call needs {min(waiting):.0f} s at least)"
        said.append(f"{len(waiting)} of {len(jobs)} left; the same command goes on {least}")
    return said, bool(waiting) or not left


def _blocked_by(job: Any, jobs: Sequence[Any], results: Any) -> str:
    """Returns the failed job that ``job`` comes after; empty if only time was short."""
    from benchmarks.gpu_suite.jobs import FAILED, TIMED_OUT, unmet

    for key in unmet(job, jobs, results):
        row = results.latest(next(other for other in jobs if other.key == key))
        if row is not None and row["status"] in (FAILED, TIMED_OUT):
            return f"{key}, which {row['status']}: {row['error']}"
    return ""


def _show_failed_preparations(jobs: Sequence[Any], results: Any) -> None:
    for job in jobs:
        row = results.latest(job) if job.prepares else None
        if row is None or "output" not in row or row["status"] == "done":
            continue
        print(f"\n{job.key} {row['status']}: {row['error']}; its last words (the log has all of them):")
        for line in row["output"].rstrip().splitlines()[-_SHOWN_LINES:]:
            print(f"  {line[:_SHOWN_WIDTH]}")


if __name__ == "__main__":
    raise SystemExit(main())
