"""Runs what has no result yet, keeps every result as it comes, prints one table: python -m benchmarks.gpu_suite."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_suite.bare_machine import CARRIED, prepare
from superoffload.errors import ArgumentError, SuperOffloadError
from superoffload.host.environment import DEVICE_TIMEOUT
from superoffload.tools.output import naming_write_errors

NAME = "gpu_suite.json"
SLOTS = ("first", "second", "third", "superchip")
_LEFT = 3  # exit status
_DEVICE_SECONDS = "45"  # after which our link gives a device up: before any job's own time is over
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
    environment = {FILES_VARIABLE: str(path.parent.resolve()), DEVICE_TIMEOUT: _DEVICE_SECONDS}
    time_left = args.time_limit - (time.monotonic() - began)
    left = run_jobs(jobs, results, time_left, retry=args.retry, environment=environment)
    rows = results.rows(jobs)
    targets = all_targets(rows)
    found = {"left": [job.key for job in left], "targets": [target.as_json() for target in targets]}
    results.merge(jobs, {"command": sys.argv, "slot": args.slot, "gpu": _gpu(rows), **found})
    said, goes_on = _describe_left(jobs, left, results)
    print("\n".join([*_failed_preparations(rows), short_table(rows, targets), *said]))
    if args.toy:
        print("toy sizes: these figures show that it works, and nothing else")
    if any(map(is_wrong, rows)) or not goes_on:  # a failure matters more than what is left
        return 1
    return _LEFT if left else 0


def _check(args: argparse.Namespace) -> None:
    superchip = args.slot == "superchip"
    for wrong, text in (
        (not args.out, "out: expected --out DIR, a folder for results and log"),
        (not args.time_limit > 0, f"time_limit={args.time_limit}: expected a positive number of seconds"),
        (
            args.device in ("cpu", "stand-in") and not args.toy,
            f"device={args.device}: it shows that the suite works and no times; add --toy",
        ),
        (args.plot or args.json, "plot, json: expected --report JSON beside it, whose rows are drawn or written"),
        (
            args.capped and not (args.contestants or args.tokens),
            "capped: expected --contestants or --tokens beside it; the third slot has capped rows",
        ),
        (
            args.ranks and (not superchip or min(args.ranks) < 1),
            f"ranks={args.ranks}: expected numbers of GPUs from 1 on, with --slot superchip",
        ),
        (
            superchip and (args.tokens or args.capped),
            "slot=superchip: its rows have tokens of their own; leave out --tokens and --capped",
        ),
    ):
        if wrong:
            raise ArgumentError(text)


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


def _describe_left(jobs: Sequence[Any], left: Sequence[Any], results: Any) -> tuple[list[str], bool]:
    """Returns lines about the jobs left and why, and whether another call of the same command would make progress."""
    from benchmarks.gpu_suite.jobs import unmet

    by_key = {job.key: job for job in jobs}
    waits: Counter[str] = Counter()
    free = []
    for job in left:
        before = (results.latest(by_key[key]) for key in unmet(job, jobs, results))
        failed = next((row for row in before if row is not None and "error" in row), None)
        if failed is None:
            free.append(min(job.needs, job.seconds))
        else:
            waits[f"{failed['key']}, which {failed['status']}: {failed['error']}"] += 1
    said = [f"{count} of {len(jobs)} wait for {why}" for why, count in waits.items()]
    if free:
        least = f"(a call needs {min(free):.0f} s at least)"
        said.append(f"{len(free)} of {len(jobs)} left; the same command goes on {least}")
    return said, bool(free) or not left


def _failed_preparations(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yields the last words of smoke and of DeepSpeed's compiler; the log has all of them."""
    for row in rows:
        if "output" in row and "error" in row and row["settings"]["what"] in ("smoke", "deepspeed kernel"):
            yield f"\n{row['key']} {row['status']}: {row['error']}; its last words:"
            lines = row.get("output", "").rstrip().splitlines()[-_SHOWN_LINES:]
            yield from (f"  {line[:_SHOWN_WIDTH]}" for line in lines)


if __name__ == "__main__":
    raise SystemExit(main())
