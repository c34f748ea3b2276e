"""Runs every benchmark of the command line, one process each, and the GPU suite: python -m benchmarks.all."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from benchmarks import all_report, command
from benchmarks.all_report import GPU_SUITE, plot_path
from benchmarks.commands import ROOT, run_command
from benchmarks.jobs import LEFT, RESULT_PATH, Job, Results, run_jobs
from benchmarks.plots import matplotlib_installed
from benchmarks.sources import PACKAGE
from superoffload.errors import ArgumentError

BENCHMARKS = ("adam", "journal", "link", "memory", "ranks", "schedule", "state", "tensors", "zero3")
_NEEDS_PACKAGE = {"zero3": "deepspeed"}
# Small sizes for benchmarks without --quick.
_QUICK = {
    "zero3": "--ranks 1 --width 64 --layers 1 --tokens 16 --rounds 1 --steps 1 --clip off",
    "journal": "--steps 20 --factors 1 10",
    "memory": "--numel 1e8 --steps 20",
    "ranks": "--hidden 64 --layers 1 --rows 2 --rounds 1 --steps 1",
    "state": "--steps 20 --seeds 1",
}
_SECONDS, _SECONDS_QUICK, _SECONDS_OF_SUITE = 3600.0, 300.0, 7200.0
_MARGIN = 120.0  # for the suite to end by itself
_LEAST_OF_SUITE = 300.0  # it keeps what it has measured, so a call may cut it short


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.all",
        description="Runs every benchmark in a process of its own and writes DIR/all.json, DIR/plots and "
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
    args = parser.parse_args(arguments)
    args.command_line = ["python", "-m", "benchmarks.all", *arguments]
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command("benchmarks.all", _run, parse(sys.argv[1:] if arguments is None else arguments))


def _run(args: argparse.Namespace) -> int:
    if args.time_limit is not None and not args.time_limit > 0:
        raise ArgumentError(f"time_limit={args.time_limit}: expected a positive number of seconds")
    names = _names(args.only)
    import torch

    folder = Path(args.out)
    results = Results(folder, "all.json")
    jobs = all_jobs(names, folder, quick=args.quick, cuda=torch.cuda.is_available())
    limit = float("inf") if args.time_limit is None else args.time_limit
    left = [job.key for job in run_jobs(jobs, results, limit, command.progress(args), retry=args.retry)]
    report = results.merge(jobs, {"command": args.command_line, "quick": args.quick, "left": left})
    print(all_report.summary(report["rows"]))
    if args.quick:
        print("small sizes: these figures show that it works, and nothing else")
    print(f"{folder / 'all.json'}")
    if left:
        print(f"left for another call: {', '.join(left)}")
        return LEFT
    return 1 if any(all_report.is_wrong(row) for row in report["rows"]) else 0


def _names(only: list[str] | None) -> list[str]:
    known = [*BENCHMARKS, GPU_SUITE]
    unknown = [name for name in only or () if name not in known]
    if unknown:
        raise ArgumentError(f"only={unknown[0]}: expected some of {', '.join(known)}")
    return [name for name in known if only is None or name in only]


# ---- the jobs -----------------------------------------------------------------------------------------------------


def all_jobs(names: Sequence[str], folder: Path, *, quick: bool, cuda: bool) -> list[Job]:
    """Returns the jobs for ``names``: BENCHMARKS, and GPU_SUITE."""
    (folder / "plots").mkdir(parents=True, exist_ok=True)
    return [
        _gpu_suite(folder, quick=quick, cuda=cuda) if name == GPU_SUITE else _job(name, folder, quick=quick)
        for name in names
    ]


def _job(name: str, folder: Path, *, quick: bool) -> Job:
    known = options_of(name)
    options: list[str] = []
    if quick:
        options += ["--quick"] if "--quick" in known else _QUICK.get(name, "").split()
    if "--quiet" in known:
        options.append("--quiet")
    plot = ["--plot", str(plot_path(folder, name))] if "--plot" in known and matplotlib_installed() else []
    started = [sys.executable, "-m", f"benchmarks.{name}", *options, *plot, "--json", RESULT_PATH]
    return Job(
        name,
        started,
        {"bench": name, "options": options},
        _SECONDS_QUICK if quick else _SECONDS,
        {"PYTHONPATH": str(ROOT)},
        absent=_absent(name),
        keeps_output=True,
        sources=(*PACKAGE, "benchmarks"),
    )


def options_of(name: str) -> frozenset[str]:
    """Returns the options of `python -m benchmarks.NAME`."""
    added = import_module(f"benchmarks.{name}.__main__").make_parser()
    return frozenset(option for action in added._actions for option in action.option_strings)


def _absent(name: str) -> str | None:
    package = _NEEDS_PACKAGE.get(name)
    if package is not None and find_spec(package) is None:
        return f"{package} is not installed"
    return None


def _gpu_suite(folder: Path, *, quick: bool, cuda: bool) -> Job:
    """Returns the suite's job; its own folder lets it continue after a call cut it short."""
    toy = ["--toy"] if quick else []
    command = [
        sys.executable, "-m", "benchmarks.gpu_suite", "--out", str(folder / GPU_SUITE),
        "--time-limit", str(_SECONDS_OF_SUITE), "--json", RESULT_PATH, *toy,
    ]  # fmt: skip
    return Job(
        GPU_SUITE,
        command,
        {"bench": GPU_SUITE, "options": toy},
        _SECONDS_OF_SUITE + _MARGIN,
        {"PYTHONPATH": str(ROOT)},
        absent=None if cuda else "needs a GPU",
        keeps_output=True,
        continues=True,
        sources=(*PACKAGE, "benchmarks", "tests/gpu"),
        needs=_LEAST_OF_SUITE,
    )


if __name__ == "__main__":
    raise SystemExit(main())
