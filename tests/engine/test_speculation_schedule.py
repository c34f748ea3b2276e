"""What the schedule goes by, and that its choices are never much slower than the best fixed one, in virtual time."""

from __future__ import annotations

import random
from statistics import median

import pytest

from benchmarks.emulation.fixed_schedule import FixedSchedule
from benchmarks.emulation.machine import GRACE, Machine, Workload
from benchmarks.emulation.traces import SLOWEST, TRACES, run_trace
from benchmarks.emulation.training import EmulatedTraining
from superoffload.engine.speculation_schedule import Schedule, Situation
from superoffload.engine.spoil_prediction import SpoilPredictor
from superoffload.engine.step_model import BYTES, Kind, MeasuredTimes, Operation, StepTimes, period
from superoffload.engine.verdict import Verdict
from superoffload.errors import ArgumentError

PARAMETERS, FLOPS = 7e9, 400e12
# A small server: slow memory, PCIe, and what it costs to hand work to threads and to start a copy.
SERVER = Machine(memory=55e9, down=25e9, up=25e9, latency=1e-5, overhead=2e-5)


# ---- predicting verdicts ------------------------------------------------------------------------------------------


def predicted(verdicts: list[bool], after: int) -> tuple[int, int]:
    """How many of the verdicts after the first ``after`` were expected to be what they were, and how many there are."""
    predictor, right = SpoilPredictor(), 0
    for number, spoiled in enumerate(verdicts):
        right += number >= after and (predictor.chance > 0.5) == spoiled
        predictor.observe(spoiled)
    return right, len(verdicts) - after


@pytest.mark.parametrize("pattern", [[False], [True], [True, False], [True, True, False], [False] * 4 + [True]])
def test_patterns_are_learnt_within_twenty_steps(pattern: list[bool]) -> None:
    right, of = predicted((pattern * 60)[:60], 20)
    assert right == of


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_rate_of_independent_verdicts_is_estimated(rate: float) -> None:
    source, predictor, chances = random.Random(3), SpoilPredictor(), []
    for _ in range(400):
        predictor.observe(source.random() < rate)
        chances.append(predictor.chance)
    assert abs(sum(chances[50:]) / len(chances[50:]) - rate) < 0.08


def test_the_end_of_a_long_run_is_noticed_soon() -> None:
    predictor = SpoilPredictor()
    for _ in range(1000):
        predictor.observe(True)
    chances = []
    for _ in range(8):
        predictor.observe(False)
        chances.append(predictor.chance)
    assert chances[0] > 0.5
    assert chances[4] < 0.5
    assert chances[7] < 0.3


# ---- the model of a step ------------------------------------------------------------------------------------------


def times(
    forward: float, backward: float, step: float = 1.0, *, on_demand: bool = True, reading: float | None = None
) -> StepTimes:
    journaled, replay, publish, settle = (step * BYTES[operation] / 28 for operation in tuple(BYTES)[1:])
    reading = forward if reading is None else reading
    return StepTimes(forward, reading, backward, step, journaled, replay, publish, settle, on_demand, withdraws=True)


def test_one_pass_adds_itself_to_backward() -> None:
    assert period(times(1.0, 2.0, on_demand=False), (Kind(0.0, 0.0, True),), 64) == pytest.approx(1 + 2 + 1)
    on_demand = period(times(1.0, 2.0), (Kind(0.0, 0.0, True),), 64)
    assert on_demand == pytest.approx(3 + 1 / 64), "forward goes on beside the pass, one part behind it"


def test_two_phases_hide_behind_a_long_forward_and_cost_bytes_where_there_is_none() -> None:
    assert period(times(2.0, 4.0), (Kind(0.0, 1.0, True),), 64) == pytest.approx(6, rel=0.01)
    assert period(times(0.01, 0.01), (Kind(0.0, 1.0, True),), 64) == pytest.approx((16 + 26) / 28, rel=0.02)


def test_speculation_hides_behind_backward_and_is_replayed_after_a_clip() -> None:
    assert period(times(1.0, 2.0), (Kind(1.0, 0.0, False),), 64) == pytest.approx(3, rel=0.02)
    assert period(times(1.0, 2.0), (Kind(1.0, 0.0, True),), 64) > 3 + 30.4 / 28 - 1


def test_micro_batches_before_the_last_backward_need_no_new_parameters() -> None:
    accumulated = times(4.0, 2.0, reading=1.0)
    assert period(accumulated, (Kind(0.0, 0.0, True),), 64) == pytest.approx(6 + 1 / 64), (
        "beside the first forward only"
    )
    assert period(times(4.0, 2.0, step=3.0, reading=1.0), (Kind(0.0, 0.0, True),), 64) == pytest.approx(8, rel=0.02)
    assert period(times(4.0, 2.0, step=3.0), (Kind(0.0, 0.0, True),), 64) == pytest.approx(6, rel=0.02)


def test_the_first_forward_of_several_micro_batches_is_measured_by_the_last_backward() -> None:
    measured = MeasuredTimes()
    measured.computed(1.0, 2.5)
    assert measured.reading == 1.0, "one micro-batch"
    for _ in range(5):
        measured.computed(1.0 + 3 * 3.0, 2.0)
    assert (measured.forward, measured.reading) == (10.0, 1.0)


@pytest.mark.parametrize("micro_batches", [1, 2, 8])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("tokens", [8192, 32768])
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


def test_times_that_were_not_measured_lately_are_in_proportion() -> None:
    measured = MeasuredTimes()
    measured.worked(Operation.step, 1000, 500.0)  # the first step touches memory for the first time
    before = measured.known
    measured.computed(1.0, 2.0)
    measured.worked(Operation.step, 1000, 28.0)
    assert (before, measured.known) == (False, True)
    assert measured.seconds(Operation.publish, 1000) == pytest.approx(16.0)
    measured.worked(Operation.publish, 1000, 20.0)
    assert measured.seconds(Operation.publish, 1000) == pytest.approx(20.0)
    for _ in range(70):
        measured.computed(1.0, 2.0)
        measured.worked(Operation.step, 1000, 14.0)
    assert measured.seconds(Operation.publish, 1000) == pytest.approx(8.0), "a time of long ago"


def of_a_device(numel: int) -> tuple[Schedule, Situation]:
    """A schedule that has measured a few steps, and how the next one is at its verdict."""
    schedule = Schedule("adaptive")
    for _ in range(6):
        schedule.computed(0.04, 0.07)
        for operation in (Operation.step, Operation.step_journaled, Operation.publish, Operation.settle):
            schedule.worked(operation, numel, 0.2)
        schedule.observe(Verdict(1.0, 1.0, False, 1.0))
        situation = Situation(numel, numel // 2, 32, apart=True, on_demand=True)
        schedule.share_to_publish(situation)
    return schedule, situation


def test_what_takes_long_is_done_before_the_verdict() -> None:
    """Times that are measured meanwhile count from the next step on."""
    schedule, situation = of_a_device(1_000_000)
    for _ in range(6):
        schedule.computed(0.02, 0.05)
    computed = period.cache_info().misses
    schedule.prepare()
    prepared = period.cache_info().misses
    for _ in range(6):
        schedule.computed(0.08, 0.2)
    schedule.observe(Verdict(1.0, 1.0, False, 1.0))
    schedule.should_speculate()
    assert prepared > computed and period.cache_info().misses == prepared
    schedule.share_to_publish(situation)
    assert period.cache_info().misses - prepared < prepared - computed, "only what the waiting share needs"


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


@pytest.mark.parametrize("tokens", [2048, 4096, 6144, 8192, 12288])
def test_the_model_of_a_superchip_is_reached(tokens: int) -> None:
    """Iteration time over the bound, real engine and schedule: at most the figures of the design's model."""
    speculate = {2048: 1.07, 4096: 1.23, 6144: 1.06, 8192: 1.01, 12288: 1.01}
    clipping = {2048: 1.31, 4096: 1.50, 6144: 1.09, 8192: 1.01, 12288: 1.00}
    workload = Workload.of_tokens(PARAMETERS, tokens, FLOPS)
    for clips, expected in ((False, speculate), (True, clipping)):
        seconds = EmulatedTraining(workload, GRACE, Schedule("adaptive")).run([clips] * 14)
        ratio = sum(seconds[-4:]) / 4 / workload.bound(GRACE)
        assert round(ratio, 2) <= expected[tokens], f"clips: {clips}"


SETTINGS = [
    pytest.param(4096, GRACE, 4.0, True, id="bound by processors"),
    pytest.param(8192, GRACE, 1.05, True, id="bound by compute, clips proven late"),
    pytest.param(8192, GRACE, 1.05, False, id="eager"),
    pytest.param(8192, SERVER, 1.05, True, id="slow memory"),
]


@pytest.mark.parametrize("name", [name for name in TRACES if "1000" not in name])
@pytest.mark.parametrize(("tokens", "machine", "norm", "on_demand"), SETTINGS)
def test_adaptive_is_never_much_slower_than_the_best_fixed_choice(
    name: str, tokens: int, machine: Machine, norm: float, on_demand: bool
) -> None:
    workload = Workload.of_tokens(PARAMETERS, tokens, FLOPS, layers=8)
    result = run_trace(name, workload, machine, 70, norm=norm, on_demand=on_demand)
    assert result.ratio <= SLOWEST, result


def test_adaptive_over_a_change_of_habits() -> None:
    workload = Workload.of_tokens(PARAMETERS, 8192, FLOPS, layers=4)
    result = run_trace("clips until step 1000", workload, GRACE, 1200)
    assert result.ratio <= SLOWEST, result
