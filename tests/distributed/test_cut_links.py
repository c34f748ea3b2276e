"""Ranks on two hosts whose link is cut: every wait of ours ends in time on both, with an error that says what could
not be reached. What waits in the framework's own collectives is ended by their time-out, and is told apart."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from superoffload import AdamW
from superoffload.checkpoints import save
from superoffload.distributed.group import Exchange
from superoffload.distributed.roll_call import RollCall
from superoffload.distributed.session import RankSession
from tests.convergence.local_ranks import LocalRanks, Outcome
from tests.support.rank_processes import BF16, flat_mesh, net, shard, tokens_of
from tests.support.two_hosts import ADDRESSES, HOSTS, Link, cut, join_world, missing_for_namespaces

pytestmark = pytest.mark.skipif(missing_for_namespaces() is not None, reason=str(missing_for_namespaces()))

TIMEOUT, GRACE = 5.0, 5.0  # seconds: ours, and how much later everything must be over
OF_TORCH = 8.0  # the time-out of torch.distributed's own collectives
CUT_AT = 4  # the first step that is not checked in full


@dataclass(frozen=True)
class Ended:
    """What a rank was doing when it raised, how long that took, and destroy_process_group() after it."""

    doing: str
    error: str
    seconds: float
    destroyed: float


class Host:
    """A rank's own host. Its link is cut when the program comes to ``point``."""

    def __init__(self, names: tuple[str, ...], point: str, how: str, cuts: int) -> None:
        self.rank = join_world(names, OF_TORCH)
        self._point = point
        self._cut = (lambda: cut(names, how, cuts)) if self.rank == cuts else (lambda: None)
        self.doing, self.began = "", 0.0

    def begin(self, doing: str) -> None:
        self.doing, self.began = doing, time.monotonic()
        self.come_to(doing)

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


def plain(host: Host, folder: str) -> None:
    model = torch.nn.Linear(30, 30)
    host.begin("construction")
    optimizer = AdamW(model.parameters(), speculation="always", max_grad_norm=1.0, rank_timeout=TIMEOUT)
    for step in range(1, CUT_AT + 1):
        for param in model.parameters():
            param.grad = torch.full_like(param, 1.0)
        host.begin("step" if step == CUT_AT else "an earlier step")
        optimizer.step()
    host.begin("save")
    save(folder, model, optimizer)


def fsdp2(host: Host, folder: str) -> None:
    model = shard(net(torch.bfloat16), flat_mesh(), BF16)
    optimizer = AdamW(model.parameters(), model=model, max_grad_norm=0.5, threads=1, rank_timeout=TIMEOUT)
    for step in range(1, CUT_AT + 1):
        host.begin("forward" if step == CUT_AT else "an earlier forward")
        model.loss(tokens_of(step, host.rank)).backward()
        host.begin("step")
        optimizer.step()


def life(names: tuple[str, ...], program: str, folder: str, point: str, how: str, cuts: int) -> Ended:
    host = Host(names, point, how, cuts)
    try:
        with host.inside():
            {"plain": plain, "fsdp2": fsdp2}[program](host, folder)
    except Exception as error:
        seconds, began = time.monotonic() - host.began, time.monotonic()
        dist.destroy_process_group()
        return Ended(host.doing, f"{type(error).__name__}: {error}", seconds, time.monotonic() - began)
    raise AssertionError("no call has noticed that the link is cut")


CASES = [
    *(("plain", "exchange", how, cuts) for how in ("down", "silent") for cuts in (0, 1)),
    ("plain", "step", "silent", 1),
    ("plain", "save", "silent", 0),
    ("plain", "second message of a save", "down", 1),
    *(("plain", "construction", how, cuts) for how, cuts in (("down", 0), ("silent", 1))),
    ("plain", "roll call", "silent", 1),
    ("fsdp2", "exchange", "silent", 0),
    ("fsdp2", "forward", "silent", 0),
]
Case = tuple[str, str, str, int]


def tell(case: Case, folder: Path) -> list[Outcome]:
    with Link() as link:
        ranks = LocalRanks(2, init=False)
        try:
            return ranks.outcomes(life, link.names, case[0], str(folder / "checkpoint"), *case[1:], limit=40.0)
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
    point = case[1]
    outcomes = told[case].result()
    assert not any(outcome.error for outcome in outcomes), outcomes
    ends: list[Ended] = [outcome.value for outcome in outcomes]
    expected = EXPECTED.get(point, (ABSENT, NOT_REACHED))
    for end, words in zip(ends, expected, strict=True):
        assert end.destroyed < GRACE, end
        if point == "forward":  # in FSDP2's own collective: its error, after its time-out
            assert end.doing == "forward" and "RankError" not in end.error and end.seconds < OF_TORCH + GRACE, end
        else:
            assert "RankError" in end.error and words in end.error, end
            assert end.seconds < TIMEOUT + GRACE, end


# The library's users let the error end the program: what torch destroys then must not wait for the other host.
PROGRAM = f"""
import sys, time, torch
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
        print(time.monotonic(), flush=True)
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
            said = [program.communicate(timeout=100.0) for program in programs]
            now = time.monotonic()
        finally:
            for program in programs:
                program.kill()
        assert [program.returncode for program in programs] == [1, 1], said
        assert all("RankError: the verdict of step 4" in error for _, error in said), said
        assert all(now - float(raised) < TIMEOUT + GRACE for raised, _ in said), "one waits for the other's time-out"
