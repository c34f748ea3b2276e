"""Shares code among the commands that measure in jobs and continue where the previous call ended."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from superoffload.errors import ArgumentError, SuperOffloadError
from superoffload.tools.output import naming_write_errors

ROOT = Path(__file__).resolve().parents[1]
CARRIED = ROOT / "build" / "gpu"  # brought to a bare machine: extension, results so far, wheels
_WHEEL_SECONDS = 120.0
_SHOWN_LINES, _SHOWN_WIDTH = 25, 160  # of a failed preparation's output


def add_options(parser: argparse.ArgumentParser, *, time_limit: float = float("inf")) -> None:
    parser.add_argument("--out", metavar="DIR", help="results and log; the same folder continues")
    parser.add_argument(
        "--resume",
        metavar="JSON",
        help="results of an earlier call, here or on another machine (on a GPU, default: those in build/gpu, if any)",
    )
    parser.add_argument("--toy", action="store_true", help="sizes at which nothing is learned, to try that all works")
    default = "" if time_limit == float("inf") else f" (default: {time_limit:g})"
    parser.add_argument(
        "--time-limit", type=float, default=time_limit, metavar="SECONDS", help=f"of this call{default}"
    )
    parser.add_argument("--retry", action="store_true", help="try again what failed or took too long before")
    parser.add_argument(
        "--wheels", metavar="DIR", help="wheels to install for this call only (likewise build/gpu/wheels)"
    )
    parser.add_argument(
        "--without-sanitizer", action="store_true", help="do not run smoke under compute-sanitizer, nor wait for it"
    )


def run_command(name: str, run: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Returns the exit status; 2 for arguments that ``run`` refuses, 1 if a result cannot be written."""
    try:
        return run(args)
    except SuperOffloadError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ArgumentError) else 1


def say(line: str) -> None:
    print(line, flush=True)


def check_common(args: argparse.Namespace, name: str) -> None:
    """Raises for what no command accepts; adds what was brought to a machine with a GPU. ``name``: of the JSON."""
    if not args.out:
        raise ArgumentError("out: expected --out DIR, a folder for results and log")
    if not args.time_limit > 0:
        raise ArgumentError(f"time_limit={args.time_limit}: expected a positive number of seconds")
    if args.resume and not Path(args.resume).is_file():
        raise ArgumentError(f"resume={args.resume}: expected the JSON of an earlier call; there is no such file")
    if args.device == "cpu" and not args.toy:
        raise ArgumentError("device=cpu: the models are too large for a try on the CPU; add --toy")
    if args.device.startswith("cuda"):
        args.resume = args.resume or _if_there(CARRIED / name)
        args.wheels = args.wheels or _if_there(CARRIED / "wheels")


def out_folder(args: argparse.Namespace) -> Path:
    """Returns the folder for results and makes it if it is missing."""
    with naming_write_errors(args.out):
        Path(args.out).mkdir(parents=True, exist_ok=True)
    return Path(args.out)


def _if_there(path: Path) -> str | None:
    return str(path) if path.exists() else None


# ---- a machine that starts bare --------------------------------------------------------------------------------------


def prepare(args: argparse.Namespace, log: Path, *, builds: bool) -> str | None:
    """Describes the machine, installs wheels, and makes the extension importable; logs all of it.

    Returns why nothing can be measured, or None.
    """
    from benchmarks import machine
    from benchmarks.extension import BuildError, provide

    with log.open("a", encoding="utf-8") as file:
        file.write(f"\n===== {' '.join(sys.argv)}, {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
        for text in machine.in_full():
            file.write(f"{text}\n")
            file.flush()
    say(machine.brief())
    threads = os.environ.pop("OMP_NUM_THREADS", None)
    if threads is not None:  # set by an image, for example; it would bound our worker threads
        say(f"OMP_NUM_THREADS={threads} is in the environment; the measurements go without it")
    if args.wheels:
        _install(Path(args.wheels), log)
    if not builds:
        return None
    try:
        say(provide(log, keep_in=Path(args.out)))
    except (BuildError, OSError, subprocess.SubprocessError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _install(wheels: Path, log: Path) -> None:
    """Installs wheels for this process and its jobs, each alone: a broken one costs its own contestant only."""
    site = Path(tempfile.gettempdir()) / "superoffload-suite-site"
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    files = sorted(wheels.glob("*.whl"))
    if not files:
        raise ArgumentError(f"wheels={wheels}: expected a folder with wheels; there is none in it")
    options = ["-q", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade", "--target", str(site)]
    failed = []
    with log.open("ab") as file:
        for wheel in files:
            command = [sys.executable, "-m", "pip", "install", *options, str(wheel)]
            try:
                status = subprocess.run(command, stdout=file, stderr=file, timeout=_WHEEL_SECONDS).returncode
            except subprocess.TimeoutExpired:
                status = 1
            if status:
                failed.append(wheel.name)
    sys.path.insert(0, str(site))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    say(f"{len(files) - len(failed)} wheels installed" + (f"; not installed: {', '.join(failed)}" if failed else ""))


# ---- the end ---------------------------------------------------------------------------------------------------------


def describe_left(jobs: Sequence[Any], left: Sequence[Any], results: Any) -> tuple[list[str], bool]:
    """Returns lines about the jobs left and why, and whether another call of the same command would make progress."""
    blocked = Counter(why for job in left if (why := _blocked_by(job, jobs, results)))
    said = [f"{count} of {len(jobs)} wait for {why}" for why, count in blocked.items()]
    waiting = [job.needed_seconds for job in left if not _blocked_by(job, jobs, results)]
    if waiting:
        least = min(waiting)
        said.append(
            f"{len(waiting)} of {len(jobs)} left; the same command goes on (a call needs {least:.0f} s at least)"
        )
    return said, bool(waiting) or not left


def _blocked_by(job: Any, jobs: Sequence[Any], results: Any) -> str:
    """Returns the failed jobs that ``job`` comes after; empty if only time was short."""
    from benchmarks.jobs import FAILED, TIMED_OUT, unmet

    words = {FAILED: "failed", TIMED_OUT: "did not end"}
    for key in unmet(job, jobs, results):
        row = results.latest(next(other for other in jobs if other.key == key))
        if row is not None and row["status"] in words:
            return f"{key}, which {words[row['status']]}: {row['error']}"
    return ""


def show_failed_preparations(jobs: Sequence[Any], results: Any) -> None:
    """Shows the last lines that failed preparations printed."""
    for job in jobs:
        row = results.latest(job) if job.prepares else None
        if row is None or "output" not in row or row["status"] == "done":
            continue
        say(f"\n{job.key} {row['status']}: {row['error']}; its last words (the log has all of them):")
        for line in row["output"].rstrip().splitlines()[-_SHOWN_LINES:]:
            say(f"  {line[:_SHOWN_WIDTH]}")


def status_of(args: argparse.Namespace, left: Sequence[Any], *, goes_on: bool, failed: bool) -> int:
    """Returns the exit status; a failure matters more than what is left."""
    from benchmarks.jobs import LEFT

    if args.toy:
        print("toy sizes: these figures show that it works, and nothing else")
    if failed or not goes_on:
        return 1
    return LEFT if left else 0
