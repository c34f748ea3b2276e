"""Virtual time, and training in wall-clock time over an emulated link."""

from __future__ import annotations

import threading

import pytest

from benchmarks.emulation.clock import StalledError, VirtualClock, VirtualCompletion, when_done
from benchmarks.emulation.fixed_schedule import FixedSchedule
from benchmarks.emulation.machine import Machine, Workload
from benchmarks.emulation.paced import PacedTraining
from superoffload import _native
from superoffload.engine.speculation_schedule import Schedule

# ---- the clock ----------------------------------------------------------------------------------------------------


def test_events_happen_in_order_while_a_completion_is_waited_for() -> None:
    clock, seen = VirtualClock(), []
    clock.at(2.0, lambda: seen.append("two"))
    clock.at(1.0, lambda: seen.append("one"))
    clock.at(1.0, lambda: seen.append("one, made later"))
    clock.advance(1.5)
    assert (seen, clock.now) == (["one", "one, made later"], 1.5)
    clock.run_dry()
    assert (seen[-1], clock.now) == ("two", 2.0)


def test_waiting_moves_the_clock_on_to_the_completion() -> None:
    clock = VirtualClock()
    completion = VirtualCompletion(clock)
    clock.at(3.0, completion.finish)
    assert not completion.done()
    assert completion.wait()
    assert clock.now == 3.0
    failed = VirtualCompletion(clock)
    failed.fail("planted")
    with pytest.raises(RuntimeError, match="planted"):
        failed.wait()


def test_what_nothing_will_finish_is_an_error_and_no_hang() -> None:
    clock = VirtualClock()
    with pytest.raises(StalledError, match="nothing will ever finish"):
        VirtualCompletion(clock).wait()
    with pytest.raises(StalledError, match="native completion"):
        when_done(_native.Completion(), lambda: None)


# ---- beside real work ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clips", [False, True])
def test_in_wall_clock_time_every_schedule_has_the_same_bits(clips: bool) -> None:
    workload = Workload(1 << 16, forward=4e-3, backward=8e-3, layers=4)
    machine = Machine(memory=0.0, down=1e9, up=1e9)
    digests = []
    for schedule, on_demand in (
        (Schedule("never"), False),
        (Schedule("always"), True),
        (Schedule("adaptive"), True),
        (FixedSchedule(speculates=False, published=1.0), True),
        (FixedSchedule(speculates=True, published=0.5), False),
    ):
        training = PacedTraining(workload, machine, schedule, [-1, -1], on_demand=on_demand)
        try:
            for _ in range(4):
                assert training.step(clips) > 0.9 * (workload.forward + workload.backward)
            training.rest()
            digests.append(training.engine.digests())
        finally:
            training.close()
    assert all(digest == digests[0] for digest in digests)


def test_an_emulated_link_ends_with_its_engine() -> None:
    before = threading.active_count()
    workload = Workload(1 << 13, forward=1e-3, backward=1e-3, layers=2)
    training = PacedTraining(workload, Machine(0.0, 1e9, 1e9), Schedule("never"), [-1], on_demand=True)
    training.step(clips=False)
    training.close()
    training.close()
    assert threading.active_count() <= before
