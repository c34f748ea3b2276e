"""python -m benchmarks.gpu_suite: runs what has no result yet, writes one JSON, prints one table."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.commands import ROOT, add_options, run_command, say, status_of
from superoffload.errors import ArgumentError

NAME = "gpu_suite.json"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_suite",
        description="Training steps on one GPU: ours, everything on the GPU, and peers. A call ends within its time "
        "limit, and the next one goes on where it ended. Exits with 0 once everything has been tried, 3 if something "
        "is left for another call, 1 if GPU tests fail or delays change a bit.",
    )
    add_options(parser, time_limit=540.0)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu with --toy (default: cuda)")
    parser.add_argument("--row-limit", type=float, default=180.0, metavar="SECONDS", help="of one row (default: 180)")
    parser.add_argument("--contestants", nargs="+", metavar="NAME", help="only these (default: all; see --list)")
    parser.add_argument("--tokens", type=int, nargs="+", metavar="N", help="tokens per step (default: of the size)")
    parser.add_argument("--races", action="store_true", help="random delays on every stream must not change a bit")
    parser.add_argument("--only-races", action="store_true", help="nothing else")
    parser.add_argument("--everything", action="store_true", help="build, tests marked gpu, races, all rows")
    parser.add_argument("--json", metavar="PATH", help=f"write the merged results to this file too (DIR/{NAME})")
    parser.add_argument("--list", action="store_true", help="show the contestants and what is left to do, and end")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    return run_command("gpu_suite", _run, parse(arguments))


def _run(args: argparse.Namespace) -> int:
    _check(args)
    began = time.monotonic()
    if args.everything:
        _build()
    from benchmarks.gpu_suite.rows import all_jobs
    from benchmarks.gpu_suite.table import descriptions, table
    from benchmarks.gpu_suite.targets import all_targets
    from superoffload.benchmarking.jobs import Results, run_jobs
    from superoffload.reporting.run_folder import check_writable, write_json

    check_writable(args.json, "json")
    jobs = all_jobs(_plan(args))
    results = Results(Path(args.out), NAME)
    if args.list:
        print(descriptions())
        print("\n".join(f"left: {job.key}" for job in jobs if results.row(job) is None))
        return 0
    remaining = args.time_limit - (time.monotonic() - began)
    left = run_jobs(jobs, results, remaining, say, retry=args.retry)
    rows = results.rows(jobs)
    targets = all_targets(rows)
    found = {"gpu": _gpu(rows), "left": [job.key for job in left], "targets": [target.as_json() for target in targets]}
    report = results.merge(jobs, {"command": sys.argv, **found})
    if args.json:
        write_json(args.json, report)
    print(table(report["rows"], targets))
    return status_of(args, left, jobs, failed=any(_is_wrong(row) for row in report["rows"]))


def _check(args: argparse.Namespace) -> None:
    if args.device.startswith("cpu") and not args.toy:
        raise ArgumentError("device=cpu: a billion parameters are too many for a try on the CPU; add --toy")
    for name in ("time_limit", "row_limit"):
        if not getattr(args, name) > 0:
            raise ArgumentError(f"{name}={getattr(args, name)}: expected a positive number of seconds")
    if args.device.startswith("cuda"):
        import torch

        if not torch.cuda.is_available():
            raise ArgumentError(
                f"device={args.device}: torch sees no CUDA device; --device cpu --toy tries the same code paths"
            )


def _plan(args: argparse.Namespace) -> Any:
    from benchmarks.gpu_suite.contestants import CONTESTANTS
    from benchmarks.gpu_suite.rows import Plan
    from benchmarks.gpu_suite.settings import FULL, TOY

    chosen = tuple(args.contestants or CONTESTANTS)
    unknown = [name for name in chosen if name not in CONTESTANTS]
    if unknown:
        raise ArgumentError(f"contestants={unknown[0]}: expected some of {', '.join(CONTESTANTS)}")
    return Plan(
        device=args.device,
        size=TOY if args.toy else FULL,
        toy=args.toy,
        contestants=chosen,
        tokens=tuple(args.tokens) if args.tokens else None,
        rows=not args.only_races,
        races=args.races or args.only_races or args.everything,
        tests=args.everything,
        row_seconds=min(args.row_limit, args.time_limit),
    )


def _build() -> None:
    """The extension, as far as it is not up to date; without it nothing of ours can be imported."""
    print("building the extension", flush=True)
    built = subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=ROOT, check=False)
    if built.returncode:
        raise ArgumentError(f"build: setup.py build_ext ended with {built.returncode}; see what it said above")


def _gpu(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Name, memory and CUDA version, from the first row that knows them; None on a CPU."""
    results = (row["result"] for row in rows if row.get("result"))
    names = ("device", "gpu_memory_bytes", "cuda")
    return next(({name: found[name] for name in names} for found in results if "gpu_memory_bytes" in found), None)


def _is_wrong(row: dict[str, Any]) -> bool:
    if row["settings"].get("what") == "races":
        return bool(row["status"] == "done" and row["result"]["different_seeds"])
    return bool(row["key"] == "tests" and row["status"] != "done")


if __name__ == "__main__":
    raise SystemExit(main())
