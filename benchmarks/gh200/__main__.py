"""Measures a Superchip in one command that can be continued: python -m benchmarks.gh200."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.commands import (
    ROOT,
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

NAME = "gh200.json"
_SOURCES = ("superoffload", "csrc", "setup.py", "benchmarks/gh200")
PARTS = ("machine", "schedule", "published")
_RUN_SECONDS, _TOY_SECONDS = 5400.0, 300.0
_LEAST_SECONDS = 600.0  # the least time left in a call to begin one of these runs
_DEVICE_SECONDS = 120.0  # after which our link gives a device up: before a run's own time is over


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gh200",
        description="Bandwidths, Adam on every number of cores, schedule, and the setting of the published evaluation "
        "on one to four GPUs. Exits with 0 once all has been tried, 3 if something is left.",
    )
    add_options(parser)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu with --toy (default: cuda)")
    parser.add_argument(
        "--ranks", type=int, nargs="+", metavar="N", help="GPUs (default: 1, 2, 4, as many as there are)"
    )
    parser.add_argument("--hidden", type=int, nargs="+", metavar="N", help="hidden sizes (default: 2048 to 5120)")
    parser.add_argument("--engines", nargs="+", metavar="NAME", help="of the published setting (default: all)")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=f"only these of {', '.join(PARTS)}")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    return run_command("gh200", _run, parse(arguments))


def _run(args: argparse.Namespace) -> int:
    check_common(args, NAME)
    began = time.monotonic()
    folder = out_folder(args)
    log = (folder / NAME).with_suffix(".log")
    error = prepare(args, log, builds=args.device != "cpu")
    if error is not None:
        say(f"nothing was measured: {error}")
        return 1
    return _measure(args, folder, log, began)


def _measure(args: argparse.Namespace, folder: Path, log: Path, began: float) -> int:
    import torch

    from benchmarks.gh200.report import draw, text
    from benchmarks.jobs import DONE, NOT_HERE, Results, run_jobs

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if args.device == "cuda" and gpus == 0:
        raise ArgumentError("device=cuda: torch sees no CUDA device; --device cpu --toy tries the same code paths")
    jobs = all_jobs(args, folder, gpus)
    results = Results(folder, NAME, earlier=Path(args.resume) if args.resume else None, log=log)
    remaining = args.time_limit - (time.monotonic() - began)
    left = run_jobs(jobs, results, remaining, say, retry=args.retry)
    names = [job.key for job in left]
    report = results.merge(jobs, {"command": sys.argv, "left": names})
    drawn = draw(report["rows"], folder / "published.png")
    show_failed_preparations(jobs, results)
    said, goes_on = describe_left(jobs, left, results)
    print("\n".join([*text(report["rows"]), *drawn, *said]))
    failed = any(row["status"] not in (DONE, NOT_HERE) for row in report["rows"])
    return status_of(args, left, goes_on=goes_on, failed=failed)


def all_jobs(args: argparse.Namespace, folder: Path, gpus: int) -> list[Any]:
    from benchmarks.all import BENCHMARKS
    from benchmarks.all import all_jobs as benchmarks
    from benchmarks.gpu_suite.rows import smoke_jobs
    from superoffload.host.environment import DEVICE_TIMEOUT

    parts = args.only or PARTS
    smoke = list(smoke_jobs(args.device, sanitized=not args.without_sanitizer))
    jobs: list[Any] = []
    if "machine" in parts:
        jobs += _machine(args, folder)
    named = [name for name in BENCHMARKS if name in parts]
    jobs += benchmarks(named, folder, quick=args.toy, cuda=gpus > 0)
    if "published" in parts:
        jobs += _published(args, gpus)
    after = tuple(job.key for job in smoke)
    timeout = {DEVICE_TIMEOUT: f"{_DEVICE_SECONDS:g}"}
    return [
        *smoke,
        *(replace(job, after=after, needs=_LEAST_SECONDS, environment={**timeout, **job.environment}) for job in jobs),
    ]


def _machine(args: argparse.Namespace, folder: Path) -> list[Any]:
    """Returns jobs for doctor's findings, the link, packing, and Adam on every number of processors."""
    from benchmarks.gpu_suite.rows import child
    from benchmarks.gpu_suite.settings import FULL, TOY
    from benchmarks.jobs import RESULT_PATH, Job
    from superoffload.host.processors import allowed_cpus

    seconds = _TOY_SECONDS if args.toy else _RUN_SECONDS
    copy = {"device_name": args.device, "numbytes": (TOY if args.toy else FULL).copy_bytes}
    ours = [sys.executable, "-m", "superoffload"]
    quick = ["--numel", "16384", "--sizes", "--seconds", "0.1"] if args.toy else ["--seconds", "10"]
    threads = [str(count) for count in range(1, len(allowed_cpus()) + 1)]
    adam = [sys.executable, "-m", "benchmarks.adam", "--quiet", *quick, "--threads", *threads, "--json", RESULT_PATH]
    doctor = [*ours, "doctor", "--json", RESULT_PATH]
    settings = {"what": "machine", "threads": threads, "quick": quick}
    return [
        Job("doctor", doctor, {"what": "machine"}, seconds, accepts=(0, 1), keeps_output=True),
        Job("link", child("link", copy), {"what": "machine", **copy}, seconds),
        Job("pack", child("pack", copy), {"what": "machine", **copy}, seconds),
        Job("adam on every number of cores", adam, settings, seconds, keeps_output=True),
    ]


def _published(args: argparse.Namespace, gpus: int) -> list[Any]:
    """Returns the smallest model on one GPU first, ours before the others."""
    from benchmarks.gh200.engines import ENGINES, engines_for
    from benchmarks.gh200.setting import PUBLISHED_SIZES, TOY_SIZES, published_run, toy_run
    from benchmarks.jobs import Job

    unknown = [name for name in args.engines or () if name not in ENGINES]
    if unknown:
        raise ArgumentError(f"engines={unknown[0]}: expected some of {', '.join(ENGINES)}")
    counts = args.ranks or [count for count in (1, 2, 4) if count <= max(gpus, 2 if args.toy else 1)]
    make, sizes = (toy_run, TOY_SIZES) if args.toy else (published_run, PUBLISHED_SIZES)
    jobs = []
    for hidden in args.hidden or sizes:
        for ranks in counts:
            for name in engines_for(args.engines):
                run = make(name, args.device, ranks, hidden)
                absent = ENGINES[name].absent(args.device)
                if args.device == "cuda" and ranks > gpus:
                    absent = f"needs {ranks} GPUs, and there are {gpus}"
                settings = {"what": "published", "run": run.as_json()}
                seconds = _TOY_SECONDS if args.toy else _RUN_SECONDS
                key = f"hidden {hidden}, {ranks} rank{'s' if ranks > 1 else ''}, {name}"
                command = torchrun(run.as_json(), ranks)
                jobs.append(Job(key, command, settings, seconds, _environment(), absent, sources=_SOURCES))
    return jobs


def torchrun(run: dict[str, Any], ranks: int) -> list[str]:
    from benchmarks.jobs import RESULT_PATH

    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, "-m", "benchmarks.gh200.published", json.dumps(run), RESULT_PATH]


def _environment() -> dict[str, str]:
    """Lets ranks find this folder from any working directory."""
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), before]) if before else str(ROOT)}


if __name__ == "__main__":
    raise SystemExit(main())
