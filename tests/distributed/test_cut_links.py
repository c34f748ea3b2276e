"""Ranks on two hosts whose link is cut: every wait of ours ends in time on both, with an error that says what could
not be reached. What waits in the framework's own collectives is ended by their time-out, and is told apart."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
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


@contextmanager
def cut_at(point: str, harm: Callable[[], None]) -> Iterator[Callable[[str], None]]:
    """Gives what a program calls at its points: ``harm`` comes at ``point``. Some are inside of what optimizers do."""
    join, start, wait = RollCall.join, RankSession.start, Exchange.wait

    def come_to(here: str) -> None:
        if here == point:
            harm()

    def joining(roll_call: RollCall, address: tuple[str, int], timeout: float) -> None:
        come_to("roll call")
        join(roll_call, address, timeout)

    def starting(session: RankSession, sums: dict[int, float]) -> None:
        come_to("exchange" if session._call == CUT_AT else "an earlier exchange")
        start(session, sums)

    def waiting(exchange: Exchange) -> list[bytes]:
        told = wait(exchange)
        come_to(f"second message of {exchange._what}")
        return told

    with (
        mock.patch.object(RollCall, "join", joining),
        mock.patch.object(RankSession, "start", starting),
        mock.patch.object(Exchange, "wait", waiting),
    ):
        yield come_to


def train_and_save(come_to: Callable[[str], None], folder: str) -> None:
    model = torch.nn.Linear(30, 30)
    come_to("construction")
    optimizer = AdamW(model.parameters(), speculation="always", max_grad_norm=1.0, rank_timeout=TIMEOUT)
    for step in range(1, CUT_AT + 1):
        for param in model.parameters():
            param.grad = torch.full_like(param, 1.0)
        come_to("step" if step == CUT_AT else "an earlier step")
        optimizer.step()
    come_to("save")
    save(folder, model, optimizer)


def life(names: tuple[str, ...], folder: str, point: str, how: str, cuts: int) -> str:
    """The error that the cut ends in. What torch destroys after it must not wait for the other host either."""
    rank = join_world(names, OF_TORCH)
    with cut_at(point if rank == cuts else "", lambda: cut(names, how, cuts)) as come_to:
        error = error_of(lambda: train_and_save(come_to, folder))
    dist.destroy_process_group()
    return error


CASES = [
    ("exchange", "down", 0),
    ("step", "silent", 1),
    ("save", "silent", 0),
    ("second message of save()", "down", 1),
    ("construction", "down", 0),
    ("roll call", "silent", 1),
]


def tell(point: str, how: str, cuts: int, folder: Path) -> list[Outcome]:
    with Link() as link:
        ranks = LocalRanks(2, init=False)
        try:
            return ranks.outcomes(life, link.names, str(folder / point), point, how, cuts, limit=LATEST)
        finally:
            ranks.close()


ABSENT = f"rank 1 on {HOSTS[1]} did not take part within 5 s (seen from rank 0 on {HOSTS[0]})"
NOT_REACHED = f"the roll call of rank 0 on {ADDRESSES[0]} could not be reached"
EXPECTED = {
    "construction": ("the group of ranks 0, 1 was not made within 5 s",) * 2,
    "roll call": (ABSENT, f"the roll call of rank 0 on {ADDRESSES[0]} was not reached"),
}


def test_both_ranks_end_in_time(tmp_path: Path) -> None:
    """Side by side: most of each is waiting for a time-out. What happens in FSDP2's own collectives:
    test_several_hosts.py."""
    with ThreadPoolExecutor(6) as threads:
        told = list(threads.map(lambda case: tell(case[0], case[1], case[2], tmp_path), CASES))
    for (point, *_), outcomes in zip(CASES, told, strict=True):
        assert not any(outcome.error for outcome in outcomes), outcomes
        for outcome, words in zip(outcomes, EXPECTED.get(point, (ABSENT, NOT_REACHED)), strict=True):
            assert "RankError" in outcome.value and words in outcome.value, point


# The library's users let the error end the program: what torch destroys then must not wait for the other host.
PROGRAM = f"""
import sys, torch
from superoffload import AdamW
from tests.support.two_hosts import cut, join_world
names = tuple(sys.argv[1:])
rank = join_world(names, {OF_TORCH})
weight = torch.nn.Parameter(torch.ones(100))
optimizer = AdamW([weight], rank_timeout={TIMEOUT})
for step in range(5):
    if step == 3 and rank == 0:
        cut(names, "silent", 0)
    weight.grad = torch.ones(100)
    optimizer.step()
"""


def test_the_program_ends_in_time() -> None:
    with Link() as link:
        command = [sys.executable, "-c", PROGRAM, *link.names]
        worlds = [{**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"} for rank in range(2)]
        programs = [subprocess.Popen(command, env=world, stderr=subprocess.PIPE, text=True) for world in worlds]
        try:
            said = [program.communicate(timeout=LATEST) for program in programs]
        finally:
            for program in programs:
                program.kill()
        assert [program.returncode for program in programs] == [1, 1], said
        assert all("RankError: the verdict of step 4" in error for _, error in said), said
