"""Measures what the schedule makes of a step: in virtual time with a Superchip's figures, and in real time here."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from benchmarks.emulation.fixed_schedule import FixedSchedule
from benchmarks.emulation.machine import BEHIND_PCIE, GRACE, H200, Machine, Operation, Workload
from benchmarks.emulation.paced import PacedTraining
from benchmarks.emulation.peers import in_backward, synchronous
from benchmarks.emulation.traces import SETTLED_IN, TRACES, run_trace
from benchmarks.emulation.training import EmulatedTraining
from superoffload.engine.schedule import Schedule

Row = dict[str, Any]
Tell = Callable[[str], None]

FLOPS = 400e12
_WARM, _COUNTED = 16, 8  # virtual steps
_TRACE_STEPS = 200
_LONG_TRACE_STEPS = 1200  # of the trace that changes after 1000
_TRACE_LAYERS = 16

CONTESTANTS: dict[str, tuple[Callable[[], Schedule], bool]] = {  # schedule, and whether delivery is on demand
    "synchronous": (lambda: Schedule("never"), False),
    "one pass": (lambda: Schedule("never"), True),
    "speculate": (lambda: Schedule("always"), True),
    "two-phase": (lambda: FixedSchedule(speculates=False, published=1.0), True),
    "adaptive": (lambda: Schedule("adaptive"), True),
}

DELIVERIES = {  # whether new parameters travel before the verdict, and whether delivery is on demand
    "eager, after the verdict": (False, False),
    "eager, before the verdict": (True, False),
    "on demand": (True, True),
}
H200_PARAMETERS, H200_FLOPS = 0.974e9, 435e12  # of the GPU suite's model, and what that GPU reached with it
MICRO_BATCHES = (1, 2, 4, 8)
MACHINES = {"Superchip": GRACE, "behind PCI Express 5": BEHIND_PCIE}


@dataclass(frozen=True)
class ScheduleBenchmark:
    """Configures the benchmark; ``parts`` are some of ``PARTS``."""

    parts: Sequence[str]
    parameters: float
    tokens: Sequence[int]
    trace_steps: int
    numel: int
    cpus: Sequence[int]
    rounds: int
    steps: int


def run_schedule(settings: ScheduleBenchmark, tell: Tell) -> dict[str, Any]:
    """Returns rows of the model, of the traces and of this machine."""
    rows: list[Row] = []
    if "model" in settings.parts:
        rows += model_rows(settings, tell)
    if "delivery" in settings.parts:
        rows += delivery_rows(settings, tell)
    if "traces" in settings.parts:
        rows += trace_rows(settings, tell)
    if "micro-batches" in settings.parts:
        rows += micro_batch_rows(tell)
    limit: dict[str, Any] = {"model": {**_machine_facts(GRACE), "flops": FLOPS}}
    limit["delivery"] = {name: _machine_facts(machine) for name, machine in MACHINES.items()}
    if "wall-clock" in settings.parts:
        wall, facts = wall_clock_rows(settings, tell)
        rows += wall
        limit["wall_clock"] = facts
    return {"limit": limit, "rows": rows}


def _machine_facts(machine: Machine) -> dict[str, Any]:
    facts = asdict(machine)
    facts["bytes_of"] = {str(operation).rpartition(".")[2]: size for operation, size in machine.bytes_of.items()}
    return facts


# ---- virtual time -------------------------------------------------------------------------------------------------


def model_rows(settings: ScheduleBenchmark, tell: Tell) -> list[Row]:
    """Returns seconds per step over the bound, for others by arithmetic, for us by the real engine and schedule."""
    rows = []
    for tokens in settings.tokens:
        tell(f"{tokens} tokens per step, in virtual time")
        workload = Workload.of_tokens(settings.parameters, tokens, FLOPS)
        bound = workload.bound(GRACE)

        def row(name: str, clips: bool, seconds: float, tokens: int = tokens, bound: float = bound) -> None:
            verdict = "clips at every step" if clips else "never clips"
            rows.append(
                {
                    "part": "model",
                    "name": f"{tokens} tokens: {name}, {verdict}",
                    "contestant": name,
                    "tokens": tokens,
                    "clips": clips,
                    "numel": int(settings.parameters),
                    "seconds_median": seconds,
                    "seconds_min": seconds,
                    "ratio_to": "bound",
                    "ratio": seconds / bound,
                }
            )

        row("another system, synchronous", True, synchronous(workload, GRACE))
        row("another system, in backward", False, in_backward(workload, GRACE))
        for name, (make, on_demand) in CONTESTANTS.items():
            if name == "synchronous":
                continue
            for clips in (False, True):
                training = EmulatedTraining(workload, GRACE, make(), on_demand=on_demand)
                row(name, clips, median(training.run([clips] * (_WARM + _COUNTED))[_WARM:]))
    return rows


def delivery_rows(settings: ScheduleBenchmark, tell: Tell) -> list[Row]:
    """Measures the gain from new parameters that travel before the verdict, in speculated steps without clips."""
    rows = []
    for machine_name, machine in MACHINES.items():
        for tokens in settings.tokens:
            tell(f"{tokens} tokens per step, deliveries, {machine_name}")
            workload = Workload.of_tokens(settings.parameters, tokens, FLOPS)
            for name, (stages, on_demand) in DELIVERIES.items():
                schedule = Schedule("always")
                training = EmulatedTraining(workload, machine, schedule, on_demand=on_demand, stages=stages)
                seconds = median(training.run([False] * (_WARM + _COUNTED))[_WARM:])
                rows.append(
                    {
                        "part": "delivery",
                        "name": f"{machine_name}, {tokens} tokens: {name}",
                        "machine": machine_name,
                        "contestant": name,
                        "tokens": tokens,
                        "numel": int(settings.parameters),
                        "seconds_median": seconds,
                        "seconds_min": seconds,
                        "ratio_to": "bound",
                        "ratio": seconds / workload.bound(machine),
                    }
                )
    return rows


def trace_rows(settings: ScheduleBenchmark, tell: Tell) -> list[Row]:
    """Compares adaptive with the best fixed choice on every named trace."""
    rows = []
    for tokens in settings.tokens:
        workload = Workload.of_tokens(settings.parameters, tokens, FLOPS, layers=_TRACE_LAYERS)
        for name in TRACES:
            tell(f"{tokens} tokens per step, verdicts: {name}")
            long = "1000" in name and settings.trace_steps >= _TRACE_STEPS
            steps = _LONG_TRACE_STEPS if long else settings.trace_steps
            result = run_trace(name, workload, GRACE, steps)
            seconds = result.adaptive / (steps - SETTLED_IN)
            rows.append(
                {
                    "part": "trace",
                    "name": f"{tokens} tokens: adaptive, {name}",
                    "trace": name,
                    "tokens": tokens,
                    "steps": steps,
                    "numel": int(settings.parameters),
                    "seconds_median": seconds,
                    "seconds_min": seconds,
                    "fixed_seconds": {k: v / (steps - SETTLED_IN) for k, v in result.fixed.items()},
                    "ratio_to": result.best,
                    "ratio": result.ratio,
                }
            )
    return rows


def micro_batch_rows(tell: Tell) -> list[Row]:
    """Measures steps in several micro-batches, of which only the last one's gradients are final."""
    rows = []
    for tokens in (8192, 32768):
        for count in MICRO_BATCHES:
            tell(f"{tokens} tokens per step in {count} micro-batches")
            workload = Workload.of_tokens(H200_PARAMETERS, tokens, H200_FLOPS, layers=33, micro_batches=count)
            for name in ("one pass", "speculate", "two-phase", "adaptive"):
                for clips in (False, True):
                    training = EmulatedTraining(workload, H200, CONTESTANTS[name][0]())
                    seconds = median(training.run([clips] * (_WARM + _COUNTED))[_WARM:])
                    verdict = "clips at every step" if clips else "never clips"
                    rows.append(
                        {
                            "part": "micro-batches",
                            "name": f"{tokens} tokens in {count}: {name}, {verdict}",
                            "contestant": name,
                            "tokens": tokens,
                            "micro_batches": count,
                            "clips": clips,
                            "numel": int(H200_PARAMETERS),
                            "seconds_median": seconds,
                            "seconds_min": seconds,
                            "ratio_to": "bound",
                            "ratio": seconds / workload.bound(H200),
                        }
                    )
    return rows


# ---- wall-clock time ----------------------------------------------------------------------------------------------


def wall_clock_rows(settings: ScheduleBenchmark, tell: Tell) -> tuple[list[Row], dict[str, Any]]:
    """Times contestants in turn, each with its own model; layers take a multiple of this machine's plain pass."""
    machine = Machine(memory=0.0, down=25e9, up=25e9)  # the link is emulated; the memory is this machine's own
    layers = 16
    plain = _plain_pass(settings, layers)
    workload = Workload(settings.numel, forward=0.6 * plain, backward=1.2 * plain, layers=layers)
    bound = max(workload.forward + workload.backward, plain)
    tell(f"a plain pass over {settings.numel} parameters takes {1e3 * plain:.1f} ms here")
    rows = []
    for clips in (False, True):
        trainings = {
            name: PacedTraining(workload, machine, make(), settings.cpus, on_demand=on_demand)
            for name, (make, on_demand) in CONTESTANTS.items()
        }
        try:
            seconds = _in_turn(trainings, clips, settings, tell)
        finally:
            for training in trainings.values():
                training.close()
        for name, samples in seconds.items():
            pairs = zip(samples, seconds["synchronous"], strict=True)
            rows.append(
                {
                    "part": "wall clock",
                    "name": f"this machine: {name}, {'clips at every step' if clips else 'never clips'}",
                    "contestant": name,
                    "clips": clips,
                    "threads": len(settings.cpus),
                    "numel": settings.numel,
                    "seconds_median": median(samples),
                    "seconds_min": min(samples),
                    "of_bound": median(samples) / bound,
                    "ratio_to": "synchronous",
                    "ratio": median(mine / theirs for mine, theirs in pairs),
                }
            )
    facts = {"plain_pass_seconds": plain, "forward_seconds": workload.forward, "backward_seconds": workload.backward}
    return rows, {**facts, "link_bytes_per_second": machine.down, "layers": layers, "bound_seconds": bound}


def _plain_pass(settings: ScheduleBenchmark, layers: int) -> float:
    """Returns the processors' seconds for one pass over all parameters on an idle machine."""
    workload = Workload(settings.numel, forward=0.0, backward=0.0, layers=layers)
    training = PacedTraining(workload, Machine(0.0, 1e15, 1e15), Schedule("never"), settings.cpus, on_demand=False)
    try:
        for _ in range(2 + settings.steps):
            training.step(clips=True)
        return training.engine.schedule.times.seconds(Operation.step, settings.numel)
    finally:
        training.close()


def _in_turn(
    trainings: dict[str, PacedTraining], clips: bool, settings: ScheduleBenchmark, tell: Tell
) -> dict[str, list[float]]:
    """Returns medians of a few steps of each, round by round; the first round warms up and is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in trainings}
    for number in range(settings.rounds + 1):
        tell(f"round {number} of {settings.rounds}, {'clipping' if clips else 'not clipping'}, beside real work")
        for name, training in trainings.items():
            training.rest()
            time.sleep(0.01)
            training.rest()
            samples = [training.step(clips) for _ in range(settings.steps + 2)][2:]
            if number:
                seconds[name].append(median(samples))
    return seconds
