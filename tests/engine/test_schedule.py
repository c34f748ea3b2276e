"""What the schedule goes by, and that its choices are never much slower than the best fixed one, in virtual time."""

from __future__ import annotations

import random
from statistics import median

import pytest

from benchmarks.emulation.traces import SLOWEST, FixedSchedule, run_trace
from benchmarks.emulation.training import GRACE, EmulatedTraining, Machine, Workload
from superoffload.engine.schedule import (
    BYTES,
    Kind,
    MeasuredTimes,
    Operation,
    Schedule,
    SpoilPredictor,
    StepTimes,
    period,
)
from superoffload.errors import ArgumentError

PARAMETERS, FLOPS = 7e9, 400e12
# A small server: slow memory, PCIe, and what it costs to hand work to threads and to start a copy.
SERVER = Machine(memory=55e9, down=25e9, up=25e9, latency=1e-5, overhead=2e-5)


# ---- predicting verdicts ------------------------------------------------------------------------------------------


def chances(verdicts: list[bool]) -> list[float]:
    """Of the next one, after each of them."""
    predictor, found = SpoilPredictor(), []
    for spoiled in verdicts:
        predictor.observe(spoiled)
        found.append(predictor.chance)
    return found


def test_verdicts_are_predicted() -> None:
    """Patterns within twenty steps, the rate of independent ones, and soon the end of a long run."""
    for pattern in ([False], [True], [True, False], [True, True, False], [False] * 4 + [True]):
        verdicts = (pattern * 60)[:60]
        assert [chance > 0.5 for chance in chances(verdicts)[19:-1]] == verdicts[20:]
    for rate in (0.1, 0.5, 0.9):
        source = random.Random(3)
        found = chances([source.random() < rate for _ in range(400)])[50:]
        assert abs(sum(found) / len(found) - rate) < 0.08
    ended = chances([True] * 1000 + [False] * 8)[1000:]
    assert ended[0] > 0.5 > ended[4] and ended[7] < 0.3


# ---- what is measured, and what is chosen by it --------------------------------------------------------------------


def test_the_time_of_a_step() -> None:
    one_pass, two_phases, speculated = Kind(0.0, 0.0, True), Kind(0.0, 1.0, True), Kind(1.0, 0.0, False)
    for (forward, reading, backward), step, on_demand, kind, expected in (
        ((1.0, 1.0, 2.0), 1.0, False, one_pass, 4.0),
        ((1.0, 1.0, 2.0), 1.0, True, one_pass, 3 + 1 / 64),  # forward goes on beside the pass, one part behind it
        ((0.01, 0.01, 0.01), 1.0, True, two_phases, (16 + 26) / 28),  # where there is no forward they cost bytes
        ((1.0, 1.0, 2.0), 1.0, True, speculated, 3.0),  # hidden behind backward
        ((4.0, 1.0, 2.0), 3.0, True, one_pass, 8.0),  # micro-batches: beside the first forward only
    ):
        costs = dict(zip(("journaled", "replay", "publish", "settle"), tuple(BYTES.values())[1:], strict=True))
        others = {name: step * cost / 28 for name, cost in costs.items()}
        times = StepTimes(forward, reading, backward, step, on_demand=on_demand, withdraws=True, **others)
        assert period(times, (kind,), 64) == pytest.approx(expected, rel=0.02), expected


def test_measured_times() -> None:
    """The first forward of several micro-batches is that of the last backward; what was not measured lately is in
    proportion."""
    measured = MeasuredTimes()
    measured.worked(Operation.step, 1000, 500.0)  # the first step touches memory for the first time
    before = measured.known
    measured.computed(1.0, 2.5)
    assert measured.reading == 1.0, "one micro-batch"
    measured.worked(Operation.step, 1000, 28.0)
    assert (before, measured.known) == (False, True)
    assert measured.seconds(Operation.publish, 1000) == pytest.approx(16.0)
    measured.worked(Operation.publish, 1000, 20.0)
    assert measured.seconds(Operation.publish, 1000) == pytest.approx(20.0)
    for _ in range(70):
        measured.computed(1.0 + 3 * 3.0, 2.0)
        measured.worked(Operation.step, 1000, 14.0)
    assert (measured.forward, measured.reading) == (10.0, 1.0)
    assert measured.seconds(Operation.publish, 1000) == pytest.approx(8.0), "a time of long ago"


@pytest.mark.parametrize(
    ("tokens", "clips", "micro_batches"), [(8192, False, 1), (8192, True, 8), (32768, True, 1), (32768, False, 2)]
)
def test_adaptive_is_the_best_choice_with_micro_batches(tokens: int, clips: bool, micro_batches: int) -> None:
    """With the figures of the H200 that was measured (docs/benchmarks.md), in virtual time."""
    machine = Machine(memory=127e9, down=50e9, up=50e9, overhead=50e-6)
    forward = 0.037 * tokens / 8192
    workload = Workload(0.974e9, forward, 2 * forward, layers=33, micro_batches=micro_batches)

    def seconds(schedule: Schedule) -> float:
        return median(EmulatedTraining(workload, machine, schedule).run([clips] * 24)[12:])

    fixed = (Schedule("always"), Schedule("never"), FixedSchedule(speculates=False, published=1.0))
    assert seconds(Schedule("adaptive")) <= 1.01 * min(map(seconds, fixed))


def test_what_a_device_computes_is_not_exposed() -> None:
    """Its gradients arrive long after the training thread has asked for the verdict."""
    workload = Workload(1e9, forward=0.1, backward=0.2, layers=8)
    training = EmulatedTraining(workload, Machine(memory=1e13, down=2e9, up=1e13), Schedule("always"))
    seconds = sum(training.step(False) for _ in range(4))
    exposed = training.engine.stats()["optimizer_seconds_exposed"]
    assert seconds > 4 * 1.0 and exposed < 0.01 * seconds
    training.engine.close()


# ---- choosing -----------------------------------------------------------------------------------------------------


def test_always_and_never_publish_nothing_in_two_phases() -> None:
    with pytest.raises(ArgumentError, match="speculation='sometimes'"):
        Schedule("sometimes")
    assert Schedule("always").should_speculate() and Schedule("adaptive").should_speculate()
    assert not Schedule("never").should_speculate()
    workload = Workload.of_tokens(PARAMETERS, 8192, FLOPS, layers=4)
    for mode in ("always", "never"):
        training = EmulatedTraining(workload, GRACE, Schedule(mode))
        training.run([True] * 6)
        assert training.engine.stats()["buckets_two_phase"] == 0


@pytest.mark.parametrize(
    ("tokens", "clips", "expected"), [(2048, True, 1.31), (4096, False, 1.23), (4096, True, 1.50), (12288, False, 1.01)]
)
def test_the_model_of_a_superchip_is_reached(tokens: int, clips: bool, expected: float) -> None:
    """Iteration time over the bound, real engine and schedule: at most the figures of the design's model."""
    workload = Workload.of_tokens(PARAMETERS, tokens, FLOPS)
    seconds = EmulatedTraining(workload, GRACE, Schedule("adaptive")).run([clips] * 14)
    assert round(sum(seconds[-4:]) / 4 / workload.bound(GRACE), 2) <= expected


SETTINGS = [
    (4096, GRACE, 4.0, True),  # bound by processors
    (8192, GRACE, 1.05, True),  # bound by compute, clips proven late
    (8192, GRACE, 1.05, False),  # eager
    (8192, SERVER, 1.05, True),  # slow memory
]


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        *(("never clips", 0), ("clips at every step", 0), ("clips at every step", 1), ("alternates", 2)),
        *(("alternates", 3), ("random 10 %", 1), ("random 50 %", 2), ("random 90 %", 3)),
    ],
)
def test_adaptive_is_never_much_slower_than_the_best_fixed_choice(name: str, setting: int) -> None:
    tokens, machine, norm, on_demand = SETTINGS[setting]
    workload = Workload.of_tokens(PARAMETERS, tokens, FLOPS, layers=8)
    result = run_trace(name, workload, machine, 70, norm=norm, on_demand=on_demand)
    assert result.ratio <= SLOWEST, result
