"""`superoffload bench all`: every benchmark of the command line, one process each, and the GPU suite."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from superoffload.benchmarking.jobs import DONE, FAILED, NOT_HERE, RESULT_PATH, TIMED_OUT, Job, with_numbers
from superoffload.benchmarking.sources import PACKAGE
from superoffload.reporting.page import Cell, Page, code, mark
from superoffload.reporting.plots import matplotlib_installed

Row = Mapping[str, Any]

GPU_SUITE = "gpu_suite"
_ROOT = Path(__file__).resolve().parents[2]
_NEEDS_PACKAGE = {"deepspeed": "deepspeed"}
# Small sizes of those that have no --quick of their own.
_QUICK = {
    "deepspeed": "--ranks 1 --width 64 --layers 1 --tokens 16 --rounds 1 --steps 1 --clip off",
    "journal": "--steps 20 --factors 1 10",
    "ranks": "--hidden 64 --layers 1 --rows 2 --rounds 1 --steps 1",
    "state": "--steps 20 --seeds 1",
}
_SECONDS, _SECONDS_QUICK, _SECONDS_OF_SUITE = 3600.0, 300.0, 7200.0
_MARGIN = 120.0  # for the suite to end by itself
_LEAST_OF_SUITE = 300.0  # it keeps what it has measured, so it may be cut short


def all_jobs(names: Sequence[str], folder: Path, *, quick: bool, cuda: bool) -> list[Job]:
    """``names``: of ``superoffload bench``, and GPU_SUITE."""
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
    command = [sys.executable, "-m", "superoffload", "bench", name, *options, *plot, "--json", RESULT_PATH]
    return Job(
        name,
        command,
        {"bench": name, "options": options},
        _SECONDS_QUICK if quick else _SECONDS,
        absent=_absent(name),
        keeps_output=True,
    )


def options_of(name: str) -> frozenset[str]:
    """What `superoffload bench NAME` accepts."""
    parser = argparse.ArgumentParser()
    added = import_module(f"superoffload.cli.bench_{name}").add_parser(parser.add_subparsers())
    return frozenset(option for action in added._actions for option in action.option_strings)


def plot_path(folder: Path, name: str) -> Path:
    return folder / "plots" / f"{name}.png"


def _absent(name: str) -> str | None:
    package = _NEEDS_PACKAGE.get(name)
    if package is not None and find_spec(package) is None:
        return f"{package} is not installed"
    return None


def _gpu_suite(folder: Path, *, quick: bool, cuda: bool) -> Job:
    """In a folder of its own, which continues by itself when it was cut short."""
    toy = ["--toy"] if quick else []
    command = [
        sys.executable, "-m", "benchmarks.gpu_suite", "--out", str(folder / GPU_SUITE),
        "--time-limit", str(_SECONDS_OF_SUITE), "--json", RESULT_PATH, *toy,
    ]  # fmt: skip
    absent = None
    if not (_ROOT / "benchmarks" / GPU_SUITE).is_dir():
        absent = "needs a checkout of superoffload: the suite is not part of the package"
    elif not cuda:
        absent = "needs a GPU"
    environment = {"PYTHONPATH": str(_ROOT)}
    settings = {"bench": GPU_SUITE, "options": toy}
    seconds = _SECONDS_OF_SUITE + _MARGIN
    return Job(
        GPU_SUITE, command, settings, seconds, environment, absent, keeps_output=True, continues=True,
        sources=(*PACKAGE, "benchmarks", "tests/gpu"), needs=_LEAST_OF_SUITE,
    )  # fmt: skip


# ---- what is shown ------------------------------------------------------------------------------------------------


def is_wrong(row: Row) -> bool:
    return row["status"] in (FAILED, TIMED_OUT)


def summary(rows: Sequence[Row]) -> str:
    """One line per benchmark."""
    return "\n".join(f"{row['key']:<12}{_outcome(row):<24}{headline(row)}" for row in rows)


def _outcome(row: Row) -> str:
    return f"{row['status']}, {row['wall_seconds']:.0f} s" if row["status"] != NOT_HERE else "not measured"


def headline(row: Row) -> str:
    """The figure one looks for first; why there is none otherwise."""
    if row["status"] != DONE:
        return str(row["error"])
    result = with_numbers(row["result"])
    make = _HEADLINES.get(row["key"])
    return make(result) if make is not None else f"{len(result.get('rows', []))} rows"


def _of_adam(result: Row) -> str:
    most = max(row["threads"] for row in result["rows"])
    largest = max(row["numel"] for row in result["rows"])
    table = [row for row in result["rows"] if (row["threads"], row["numel"]) == (most, largest)]
    step = [row for row in table if row["name"] == "step"][-1]
    peer = next((row for row in table if row["name"] == "torch fused, same job"), None)
    text = f"step {step['gb_per_s']:.0f} GB/s with {most} threads ({step['isa']}), {step['of_limit']:.2f} of the limit"
    return text if peer is None else f"{text}; torch takes {peer['ratio']:.2f} times as long"


def _of_journal(result: Row) -> str:
    shown = [f"{row['mean_after_step_10']:.2f} ({row['name']})" for row in result["rows"]]
    return f"bytes per parameter: {', '.join(shown)}"


def _of_state(result: Row) -> str:
    return f"bf16 minus fp32 moments: {result['mean_difference']:+.4f} nats per byte"


def _of_ranks(result: Row) -> str:
    return ", ".join(f"rank_check={row['name']}: {row['of_step']:.2%} of a step" for row in result["rows"])


def _of_link(result: Row) -> str:
    waiting = max(row["processors_per_worker"] for row in result["rows"] if row["name"] == "waiting")
    waking = max(row["seconds_median"] for row in result["rows"] if row["name"] == "arrival to first chunk")
    return f"a waiting worker takes {waiting:.4f} of a processor, and begins {1e6 * waking:.0f} us after an arrival"


def _of_tensors(result: Row) -> str:
    row = [row for row in result["rows"] if row["name"] == "AdamW"][-1]
    cost = 1e6 * row["seconds_per_tensor"]
    text = f"AdamW adds {cost:.0f} us per tensor to backward and step(), {row['tensors']:,} tensors"
    return text if row["ratio"] is None else f"{text}; {row['ratio']:.1f} times what {row['ratio_to']} adds"


def _of_suite(result: Row) -> str:
    verdicts = [target["verdict"] for target in result["targets"]]
    return ", ".join(f"{verdicts.count(verdict)} targets {verdict}" for verdict in dict.fromkeys(verdicts))


_HEADLINES = {
    "adam": _of_adam,
    "journal": _of_journal,
    "state": _of_state,
    "ranks": _of_ranks,
    "link": _of_link,
    "tensors": _of_tensors,
    GPU_SUITE: _of_suite,
}


def page(report: Mapping[str, Any], folder: Path, left: Sequence[str]) -> str:
    """All of it on one page that loads nothing."""
    machine = report["machine"]
    lead = f"{machine['cpu']}, {machine['cpus_usable']} processors; {report['commit']}"
    found = Page("superoffload benchmarks", lead)
    rows = report["rows"]
    failed = [f"{row['key']}: {row['error']}" for row in rows if is_wrong(row)]
    absent = [row["key"] for row in rows if row["status"] == NOT_HERE]
    text = f"{sum(row['status'] == DONE for row in rows)} of {len(rows) + len(left)} measured"
    found.verdict(not failed and not left, text, [*failed, *(f"{name}: left for another call" for name in left)])
    found.table(("benchmark", "outcome", "seconds", ""), [_cells(row) for row in rows])
    if absent:
        found.paragraph(f"Not measured here: {', '.join(absent)}. Nothing is said about them.")
    for row in rows:
        _section(found, row, folder)
    found.heading("Machine and versions")
    facts = {**machine, **report["versions"]}
    found.table(("", ""), [(name, str(value)) for name, value in facts.items()])
    return found.html()


def _cells(row: Row) -> Sequence[Cell]:
    outcome = mark(not is_wrong(row), row["status"], row["status"])
    return code(row["key"]), outcome, f"{row['wall_seconds']:.0f}", headline(row)


def _section(found: Page, row: Row, folder: Path) -> None:
    if row["status"] == NOT_HERE:
        return
    found.heading(row["key"])
    plot = plot_path(folder, row["key"])
    if row["status"] == DONE and plot.exists():
        found.image(plot, f"plot of {row['key']}")
    output = row.get("output", "").strip()
    if output:
        found.pre(output)
