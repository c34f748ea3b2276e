"""Ranks on two hosts whose link is cut: every wait of ours ends in time on both, with an error that says what could
not be reached. What waits in the framework's own collectives is ended by their time-out, and is told apart."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from superoffload import AdamW
from superoffload.checkpoints import save
from superoffload.distributed.group import Exchange, RollCall
from superoffload.distributed.session import RankSession
from tests.convergence.local_ranks import LocalRanks, Outcome
from tests.support.rank_processes import error_of
from tests.support.two_hosts import ADDRESSES, HOSTS, Link, cut, join_world, missing_for_namespaces

pytestmark = pytest.mark.skipif(missing_for_namespaces() is not None, reason=str(missing_for_namespaces()))

TIMEOUT, LATEST = 5.0, 100.0  # seconds: ours, and when a wait is taken for one without end
OF_TORCH = 60.0  # the time-out of torch.distributed's own collectives, longer than any wait of ours
CUT_AT = 4  # the first step that is not checked in full


class Host:
    """A rank's own host. Its link is cut when the program comes to ``point``."""

    def __init__(self, names: tuple[str, ...], point: str, how: str, cuts: int) -> None:
        self.rank = join_world(names, OF_TORCH)
        self._point = point
        self._cut = (lambda: cut(names, how, cuts)) if self.rank == cuts else (lambda: None)

    def come_to(self, point: str) -> None:
        if point == self._point:
            self._cut()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Also comes to points inside of what optimizers do."""
        join, start, wait = RollCall.join, RankSession.start, Exchange.wait

        def joining(roll_call: RollCall, address: tuple[str, int], timeout: float) -> None:
            self.come_to("roll call")
            join(roll_call, address, timeout)

        def starting(session: RankSession, sums: dict[int, float]) -> None:
            if session._call == CUT_AT:
                self.come_to("exchange")
            start(session, sums)

        def waiting(exchange: Exchange) -> list[bytes]:
            told = wait(exchange)
            if exchange._what == "save()":
                self.come_to("second message of a save")
            return told

        with (
            mock.patch.object(RollCall, "join", joining),
            mock.patch.object(RankSession, "start", starting),
            mock.patch.object(Exchange, "wait", waiting),
        ):
            yield


def train_and_save(host: Host, folder: str) -> None:
    model = torch.nn.Linear(30, 30)
    host.come_to("construction")
    optimizer = AdamW(model.parameters(), speculation="always", max_grad_norm=1.0, rank_timeout=TIMEOUT)
    for step in range(1, CUT_AT + 1):
        for param in model.parameters():
            param.grad = torch.full_like(param, 1.0)
        host.come_to("step" if step == CUT_AT else "an earlier step")
        optimizer.step()
    host.come_to("save")
    save(folder, model, optimizer)


def life(names: tuple[str, ...], folder: str, point: str, how: str, cuts: int) -> str:
    """The error that the cut ends in. What torch destroys after it must not wait for the other host either."""
    host = Host(names, point, how, cuts)
    with host.inside():
        error = error_of(lambda: train_and_save(host, folder))
    dist.destroy_process_group()
    return error


CASES = [
    ("exchange", "down", 0),
    ("step", "silent", 1),
    ("save", "silent", 0),
    ("second message of a save", "down", 1),
    ("construction", "down", 0),
    ("roll call", "silent", 1),
]
Case = tuple[str, str, int]


def tell(case: Case, folder: Path) -> list[Outcome]:
    with Link() as link:
        ranks = LocalRanks(2, init=False)
        try:
            return ranks.outcomes(life, link.names, str(folder / "checkpoint"), *case, limit=LATEST)
        finally:
            ranks.close()


@pytest.fixture(scope="module")
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Case, Future[Any]]]:
    """Those of the tests that are run, side by side: most of each is waiting for a time-out."""
    tests = [getattr(item, "callspec", None) for item in request.session.items if item.path == Path(__file__)]
    chosen = [spec.params["case"] for spec in tests if spec is not None]
    with ThreadPoolExecutor(6) as threads:
        yield {case: threads.submit(tell, case, tmp_path_factory.mktemp("cut")) for case in chosen}


ABSENT = f"rank 1 on {HOSTS[1]} did not take part within 5 s (seen from rank 0 on {HOSTS[0]})"
NOT_REACHED = f"the roll call of rank 0 on {ADDRESSES[0]} could not be reached"
EXPECTED = {
    "construction": ("the group of ranks 0, 1 was not made within 5 s",) * 2,
    "roll call": (ABSENT, f"the roll call of rank 0 on {ADDRESSES[0]} was not reached"),
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_both_ranks_end_in_time(case: Case, told: dict[Case, Future[Any]]) -> None:
    """What happens in FSDP2's own collectives: test_several_hosts.py."""
    outcomes = told[case].result()
    assert not any(outcome.error for outcome in outcomes), outcomes
    for outcome, words in zip(outcomes, EXPECTED.get(case[0], (ABSENT, NOT_REACHED)), strict=True):
        assert "RankError" in outcome.value and words in outcome.value


# The library's users let the error end the program: what torch destroys then must not wait for the other host.
PROGRAM = f"""
import sys, torch
from superoffload import AdamW
from superoffload.errors import RankError
from tests.support.two_hosts import cut, join_world
names = tuple(sys.argv[2:])
rank = join_world(names, {OF_TORCH})
weight = torch.nn.Parameter(torch.ones(100))
optimizer = AdamW([weight], rank_timeout={TIMEOUT})
for step in range(5):
    if step == 3 and rank == 0:
        cut(names, "silent", 0)
    weight.grad = torch.ones(100)
    try:
        optimizer.step()
    except RankError:
        print("raised", flush=True)
        raise
"""


def test_the_program_ends_in_time() -> None:
    with Link() as link:
        programs = [
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, "-", *link.names],
                env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            said = [program.communicate(timeout=LATEST) for program in programs]
        finally:
            for program in programs:
                program.kill()
        assert [program.returncode for program in programs] == [1, 1], said
        assert all("RankError: the verdict of step 4" in error for _, error in said), said
