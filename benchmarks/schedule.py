"""Measures what the schedule makes of a step, on an emulated accelerator, in virtual time.

The real engine and schedule run with the figures of a Superchip; with new parameters that travel before or after the
verdict; over named sequences of verdicts; and in micro-batches with the figures of an H200. Other systems' times come
from the same model by arithmetic.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import command, style
from benchmarks.emulation.traces import FIXED, SETTLED_IN, SLOWEST, TRACES, run_trace
from benchmarks.emulation.training import (
    BEHIND_PCIE,
    GRACE,
    H200,
    EmulatedTraining,
    Machine,
    Operation,
    Workload,
)
from superoffload.engine.schedule import Kind, Schedule, StepTimes, period

Row = dict[str, Any]

PARAMETERS, FLOPS = 7e9, 400e12
TOKENS = (2048, 4096, 6144, 8192, 12288)  # per step
MACHINES = {"Superchip": GRACE, "behind PCI Express 5": BEHIND_PCIE}
H200_PARAMETERS, H200_FLOPS = 0.974e9, 435e12  # of the GPU suite's model, and what that GPU reached with it
PARTS = ("model", "delivery", "traces", "micro-batches")
CONTESTANTS: dict[str, Callable[[], Schedule]] = {**FIXED, "adaptive": lambda: Schedule("adaptive")}
DELIVERIES = {  # whether new parameters travel before the verdict, and whether delivery is on demand
    "eager, after the verdict": (False, False),
    "eager, before the verdict": (True, False),
    "on demand": (True, True),
}
SYNCHRONOUS, IN_BACKWARD = "another system, synchronous", "another system, in backward"
_WARM, _COUNTED = 16, 8  # virtual steps
_VERDICTS = {False: "never clips", True: "clips at every step"}


def make_parser() -> argparse.ArgumentParser:
    parser = command.parser(
        "schedule",
        "Drives the real engine and schedule with an emulated accelerator, in virtual time. Exits with 1 if adaptive "
        "is more than 3 %% slower than the best fixed choice on any sequence of verdicts.",
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="some of it (default: all)")
    return parser


def run(args: argparse.Namespace) -> dict[str, Any]:
    measured: dict[str, Callable[[bool], Iterator[Row]]] = {
        "model": _model, "delivery": _delivery, "traces": _traces, "micro-batches": _micro_batches,
    }  # fmt: skip
    rows: list[Row] = []
    for part in args.parts:
        for row in measured[part](args.quick):
            rows.append(row)
            print(f"{row['name']:64} {row['ratio']:6.3f} of {row['ratio_to']}", flush=True)
    limit = {"model": {**_facts(GRACE), "flops": FLOPS}}
    limit["delivery"] = {name: _facts(machine) for name, machine in MACHINES.items()}
    missed = [row["name"] for row in rows if row["part"] == "trace" and row["ratio"] > SLOWEST]
    return {"limit": limit, "rows": rows, "missed": missed}


def _tokens(quick: bool) -> tuple[int, ...]:
    return TOKENS[:2] if quick else TOKENS


def _facts(machine: Machine) -> dict[str, Any]:
    facts = asdict(machine)
    facts["bytes_of"] = {str(operation).rpartition(".")[2]: size for operation, size in machine.bytes_of.items()}
    return facts


def _row(name: str, workload: Workload, machine: Machine, seconds: float, /, **facts: Any) -> Row:
    row = {**facts, "name": name, "numel": int(workload.parameters), "seconds_median": seconds}
    return {**row, "ratio_to": "bound", "ratio": seconds / workload.bound(machine)}


def _settled(training: EmulatedTraining, clips: bool) -> float:
    return median(training.run([clips] * (_WARM + _COUNTED))[_WARM:])


def _model(quick: bool) -> Iterator[Row]:
    """Yields steps over the bound: others' by arithmetic, ours by the real engine and schedule."""
    for tokens in _tokens(quick):
        workload = Workload.of_tokens(PARAMETERS, tokens, FLOPS)
        found = {(SYNCHRONOUS, True): synchronous(workload, GRACE), (IN_BACKWARD, False): in_backward(workload, GRACE)}
        for name, make in CONTESTANTS.items():
            for clips in (False, True):
                found[name, clips] = _settled(EmulatedTraining(workload, GRACE, make()), clips)
        for (name, clips), seconds in found.items():
            facts = {"part": "model", "contestant": name, "tokens": tokens, "clips": clips}
            yield _row(f"{tokens} tokens: {name}, {_VERDICTS[clips]}", workload, GRACE, seconds, **facts)


def _delivery(quick: bool) -> Iterator[Row]:
    """Yields speculated steps without clips, whose new parameters travel before the verdict or after it."""
    for machine_name, machine in MACHINES.items():
        for tokens in _tokens(quick):
            workload = Workload.of_tokens(PARAMETERS, tokens, FLOPS)
            for name, (stages, on_demand) in DELIVERIES.items():
                schedule = Schedule("always")
                training = EmulatedTraining(workload, machine, schedule, on_demand=on_demand, stages=stages)
                facts = {"part": "delivery", "machine": machine_name, "contestant": name, "tokens": tokens}
                what = f"{machine_name}, {tokens} tokens: {name}"
                yield _row(what, workload, machine, _settled(training, False), **facts)


def _traces(quick: bool) -> Iterator[Row]:
    """Compares adaptive with the best fixed choice on every named sequence of verdicts."""
    for tokens in _tokens(quick):
        workload = Workload.of_tokens(PARAMETERS, tokens, FLOPS, layers=16)
        for name in TRACES:
            steps = 60 if quick else 1200 if "1000" in name else 200
            result = run_trace(name, workload, GRACE, steps)
            counted = steps - SETTLED_IN
            facts = {"part": "trace", "trace": name, "tokens": tokens, "steps": steps}
            facts["fixed_seconds"] = {choice: seconds / counted for choice, seconds in result.fixed.items()}
            row = _row(f"{tokens} tokens: adaptive, {name}", workload, GRACE, result.adaptive / counted, **facts)
            yield {**row, "ratio_to": result.best, "ratio": result.ratio}


def _micro_batches(quick: bool) -> Iterator[Row]:
    """Yields steps in several micro-batches, of which only the last one's gradients are final."""
    for tokens in (8192, 32768):
        for count in (2,) if quick else (1, 2, 4, 8):
            workload = Workload.of_tokens(H200_PARAMETERS, tokens, H200_FLOPS, layers=33, micro_batches=count)
            for name, make in CONTESTANTS.items():
                for clips in (False, True):
                    seconds = _settled(EmulatedTraining(workload, H200, make()), clips)
                    facts = {"part": "micro-batches", "contestant": name, "tokens": tokens, "clips": clips}
                    what = f"{tokens} tokens in {count}: {name}, {_VERDICTS[clips]}"
                    yield _row(what, workload, H200, seconds, micro_batches=count, **facts)


# ---- other systems --------------------------------------------------------------------------------------------------


def synchronous(workload: Workload, machine: Machine) -> float:
    """Overlaps nothing: fp32 gradients down, their norm (2 bytes read per parameter), one pass, fp32 parameters up."""
    numel = workload.parameters
    copies = 4.0 * numel / machine.down + 4.0 * numel / machine.up + 2.0 * numel / machine.memory
    return workload.forward + workload.backward + copies + machine.seconds(Operation.step, numel)


def in_backward(workload: Workload, machine: Machine) -> float:
    """Steps each bucket in backward, for good, and so cannot clip; forward begins when all are done."""
    step = machine.seconds(Operation.step, workload.parameters)
    times = StepTimes(
        workload.first_forward + workload.between,
        reading=workload.first_forward,
        backward=workload.last_backward,
        step=step,
        journaled=step,  # without a journal: nothing can be undone
        replay=step,
        publish=step,
        settle=0.0,
        on_demand=False,
        withdraws=False,
    )
    return period(times, (Kind(1.0, 0.0, clips=False),), workload.layers)


# ---- the picture ----------------------------------------------------------------------------------------------------

_SHOWN = {  # by whether every step clips
    False: {IN_BACKWARD: style.ORANGE, "speculate": style.PALE_BLUE, "adaptive": style.BLUE},
    True: {SYNCHRONOUS: style.MUTED, "one pass": style.RED, "two-phase": "#b5a14f", "adaptive": style.BLUE},
}


def plot(report: dict[str, Any], path: Path) -> None:
    """Draws steps over the bound, sequences of verdicts, and deliveries; empty where a part was not measured."""
    rows = report["rows"]
    with style.drawing(path, 11, 7.2) as figure:
        never, always, traces, deliveries = figure.subplots(2, 2).flatten()
        for axes, clips in ((never, False), (always, True)):
            model = [row for row in rows if row["part"] == "model" and row["clips"] is clips]
            _draw_lines(axes, model, _SHOWN[clips], f"Step over the bound: {_VERDICTS[clips]}")
        _draw_traces(traces, [row for row in rows if row["part"] == "trace"])
        slowest = [row for row in rows if row["part"] == "delivery" and row["machine"] == [*MACHINES][-1]]
        colours = dict(zip(DELIVERIES, (style.RED, style.BLUE, style.GREEN), strict=True))
        _draw_lines(deliveries, slowest, colours, f"When parameters travel, {[*MACHINES][-1]}")


def _draw_lines(axes: Any, rows: list[Row], colours: dict[str, str], title: str) -> None:
    tokens = list(dict.fromkeys(row["tokens"] for row in rows))
    for name, colour in colours.items():
        ratios = [row["ratio"] for row in rows if row["contestant"] == name]
        line = "o-" if name in ("adaptive", *DELIVERIES) and name != "on demand" else "o--"
        axes.plot(tokens, ratios, line, ms=3.5, color=colour, label=name)
    axes.axhline(1.0, color=style.INK, linewidth=0.8)
    axes.set_xticks(tokens, [f"{count / 1024:g} k" for count in tokens])
    axes.set_xlabel("tokens per step")
    axes.set_ylim(bottom=0.9)
    axes.set_title(title)
    axes.legend()


def _draw_traces(axes: Any, rows: list[Row]) -> None:
    tokens = list(dict.fromkeys(row["tokens"] for row in rows))
    traces = list(dict.fromkeys(row["trace"] for row in rows))
    shades = (style.PALE_BLUE, style.BLUE, style.GREEN, style.ORANGE, style.MUTED)
    for number, (count, colour) in enumerate(zip(tokens, shades, strict=False)):
        ratios = [row["ratio"] - 1 for row in rows if row["tokens"] == count]
        places = [index + (number - (len(tokens) - 1) / 2) * 0.16 for index in range(len(traces))]
        axes.barh(places, ratios, 0.15, left=1, color=colour, label=str(count))
    axes.axvline(1.0, color=style.INK, linewidth=0.8)
    axes.axvline(SLOWEST, color=style.RED, linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(traces)), traces)
    axes.invert_yaxis()
    axes.set_xlim(right=1.04)
    axes.set_title("Adaptive over the best fixed choice (dotted: 3 % slower)")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), title="tokens per step")


if __name__ == "__main__":
    raise SystemExit(command.start(make_parser(), run, plot))
