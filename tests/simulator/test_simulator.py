"""The simulator: ten thousand schedules keep every promise, and planted bugs do not get past it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from benchmarks.emulation.clock import when_done
from benchmarks.emulation.link import VirtualLink
from superoffload import _native
from superoffload.engine.after_verdict import Finisher, LastStep
from superoffload.engine.bucket import BucketState
from superoffload.engine.executor import Executor
from superoffload.engine.inbox import Packer
from superoffload.engine.snapshot import Snapshots
from superoffload.engine.speculator import Speculator
from tests.simulator.schedules import simulate
from tests.simulator.simulation import BrokenPromiseError
from tests.support.checkout import ROOT

SCHEDULES = 10_000


def quiet(text: str) -> None:
    """Takes the progress and shows nothing."""


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
            piece.of(piece.shard.target()).copy_(source)

    when_done(after, lambda: None if after.error else copy())


def withdraws_too_much(speculator: Speculator) -> None:
    """Takes for waiting what has begun."""
    for bucket in speculator._layout.buckets:
        if bucket.state is BucketState.SPECULATED:
            bucket.running, bucket.doing = bucket.arrival, None
            speculator._mark_undone(bucket)


_FINISH, _DELIVER = Finisher.finish, VirtualLink.deliver
BUGS: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "a gradient is packed over one that is not settled": (LastStep, "_wait_for_settle", forgets_to_wait_for_a_settle),
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
