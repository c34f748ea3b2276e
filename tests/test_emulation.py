"""Virtual time, and the simulator: ten thousand schedules keep every promise, and planted bugs do not get past it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from superoffload import _native
from superoffload.engine.bucket import BucketState
from superoffload.engine.executor import Executor
from superoffload.engine.finisher import Finisher
from superoffload.engine.inbox import Packer
from superoffload.engine.schedule import FixedSchedule, Schedule
from superoffload.engine.snapshot import Snapshots
from superoffload.engine.speculator import Speculator
from superoffload.engine.tail import Tail
from superoffload.tools.emulation.clock import StalledError, VirtualClock, VirtualCompletion, when_done
from superoffload.tools.emulation.link import VirtualLink
from superoffload.tools.emulation.machine import Machine, Workload
from superoffload.tools.emulation.paced import PacedTraining
from tests.simulator.schedules import simulate
from tests.simulator.simulation import BrokenPromiseError

ROOT = Path(__file__).resolve().parent.parent
SCHEDULES = 10_000


def quiet(text: str) -> None:
    """Takes the progress and shows nothing."""


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


# ---- the simulator ------------------------------------------------------------------------------------------------


def test_ten_thousand_schedules() -> None:
    """In as many processes as this one may use; a failure prints its seed and how to repeat it."""
    processes = min(2, len(os.sched_getaffinity(0)))
    share = SCHEDULES // processes
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.simulator", "--count", str(share), "--seed"]
    running = [
        subprocess.Popen(
            [*command, str(number * share)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        for number in range(processes)
    ]
    for process in running:
        output, _ = process.communicate(timeout=400)
        assert process.returncode == 0, output
        assert f"{share} schedules" in output
        counts = {word: int(count) for word, count in (part.split() for part in output.splitlines()[-1].split(", "))}
        assert min(counts.values()) > share // 100, "something hardly ever happened"


def no_op(self: Any, *rest: Any, **named: Any) -> None:
    """In the place of something that matters."""


def forgets_to_wait_for_a_settle(self: Any, bucket: Any) -> None:
    """Says that it is settled without looking."""


def commits_whatever_the_verdict(finisher: Finisher, bucket: Any, factor: float) -> None:
    if bucket.state is BucketState.SPECULATED:
        bucket.move(BucketState.COMMITTED)
        finisher._stats.add(buckets_committed=1)
        return
    _FINISH(finisher, bucket, factor)


def delivers_before_the_step(link: VirtualLink, bucket: Any, after: Any) -> Any:
    return _DELIVER(link, bucket, _native.Completion.already_done())


def shows_what_it_stages(link: VirtualLink, bucket: Any, after: Any) -> None:
    """Copies into the parameters themselves."""

    def copy() -> None:
        for piece in bucket.stepped_pieces():
            source = bucket.shadow[piece.offset : piece.offset + piece.numel]
            piece.shard.target()[piece.start : piece.start + piece.numel].copy_(source)

    when_done(after, lambda: None if after.error else copy())


def withdraws_too_much(speculator: Speculator) -> None:
    """Takes for waiting what has begun."""
    for bucket in speculator._layout.buckets:
        if bucket.state is BucketState.SPECULATED:
            bucket.is_withdrawn()
            speculator._mark_undone(bucket)


_FINISH, _DELIVER = Finisher.finish, VirtualLink.deliver

BUGS: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "a gradient is packed over one that is not settled": (Tail, "_wait_for_settle", forgets_to_wait_for_a_settle),
    "a snapshot is not asked": (Snapshots, "protect", no_op),
    "speculation is committed after a clip": (Finisher, "finish", commits_whatever_the_verdict),
    "parameters are delivered before they are stepped": (VirtualLink, "deliver", delivers_before_the_step),
    "what was staged is seen before the verdict": (VirtualLink, "stage", shows_what_it_stages),
    "what was staged is delivered after a clip": (VirtualLink, "unstage", no_op),
    "a failure is swallowed": (Executor, "fail", no_op),
    "what was packed lately is not waited for": (Packer, "await_arrivals", no_op),
    "an early stop leaves work behind": (Speculator, "withdraw", withdraws_too_much),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(bug: str) -> None:
    owner, name, instead = BUGS[bug]
    with mock.patch.object(owner, name, instead), pytest.raises(BrokenPromiseError, match=r"--seed \d+"):
        simulate(range(600), 3, quiet)


def test_a_failure_is_repeated_by_its_seed(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(Finisher, "finish", commits_whatever_the_verdict):
        with pytest.raises(BrokenPromiseError) as first:
            simulate(range(100), 3, quiet)
        seed = int(str(first.value).partition("--seed ")[2].split()[0])
        with pytest.raises(BrokenPromiseError) as second:
            simulate(range(seed, seed + 1), 3, quiet)
    assert str(first.value) == str(second.value)


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
            digests.append(training.core.digests())
        finally:
            training.close()
    assert all(digest == digests[0] for digest in digests)


def test_an_emulated_link_ends_with_its_core() -> None:
    before = threading.active_count()
    workload = Workload(1 << 13, forward=1e-3, backward=1e-3, layers=2)
    training = PacedTraining(workload, Machine(0.0, 1e9, 1e9), Schedule("never"), [-1], on_demand=True)
    training.step(clips=False)
    training.close()
    training.close()
    assert threading.active_count() <= before
