"""Ranks on two hosts: the link slows, loses packets, dies or is cut, a host freezes. Those that still run end in time,
with the names of the lost ranks and their hosts, and with the state of the last finished step. What waits in the
framework's own collectives is ended by their time-out, and is told apart."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from superoffload import AdamW
from superoffload.checkpoints import save
from superoffload.distributed.group import Exchange, Hosts, RollCall
from superoffload.distributed.session import RankSession
from tests.convergence.local_ranks import LocalRanks, Outcome
from tests.support.rank_processes import BF16, error_of, net, shard, tokens_of
from tests.support.two_hosts import ADDRESSES, HOSTS, Link, cut, dropped, join_world, missing_for_namespaces, slow

needs_namespaces = pytest.mark.skipif(missing_for_namespaces() is not None, reason=str(missing_for_namespaces()))

TIMEOUT = 5.0  # ours
OF_TORCH = 8.0  # the time-out of torch.distributed's own collectives
PATIENT = 60.0  # one that is longer than any wait of ours
RANKS, STEPS, FAILS_AT = 4, 6, 4
Case = tuple[str, str]  # when and what
WHOLE: Case = ("never", "nothing")
LOST = [("backward", "the link dies"), ("exchange", "the link dies"), ("exchange", "the second host freezes")]
SURVIVED = [("backward", "the link slows"), ("backward", "the link loses packets")]


class Run(NamedTuple):
    """What a rank has seen. ``after``: digests of its state after each finished step; ``left``: after the error."""

    after: list[dict[str, str]]
    error: str = ""
    left: dict[str, str] | None = None


def happen(what: str, names: tuple[str, ...], rank: int) -> None:
    if what == "the second host freezes" and rank >= RANKS // 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif rank == 0 and what == "the link dies":
        cut(names, "silent", 0)
    elif rank == 0 and what == "the link slows":
        slow(names, megabits=5, queue=1 << 20)
    elif rank == 0 and what == "the link loses packets":
        slow(names, megabits=20, queue=6000)


def mesh_of_hosts() -> DeviceMesh:
    """One row of ranks per host. The groups that ``init_device_mesh`` makes would wait half an hour."""
    mesh, wait = torch.arange(RANKS).view(2, -1), timedelta(seconds=OF_TORCH)
    groups = [dist.new_subgroups_by_enumeration(rows.tolist(), timeout=wait)[0] for rows in (mesh.T, mesh)]
    return DeviceMesh.from_group(groups, "cpu", mesh, mesh_dim_names=("replicas", "shards"))


def train(names: tuple[str, ...], at: str, what: str) -> Run:
    """Hosts hold replicas of each other's shards (HSDP). It happens in backward, or right before the message for the
    verdict is sent: all is stepped then."""
    rank, start = join_world(names, OF_TORCH), RankSession.start
    model = shard(net(torch.bfloat16, width=40), mesh_of_hosts(), BF16)
    options: dict[str, Any] = {"speculation": "always", "threads": 1}
    optimizer = AdamW(model.parameters(), model=model, max_grad_norm=0.5, rank_timeout=TIMEOUT, **options)
    after: list[dict[str, str]] = []

    def starting(session: RankSession, sums: dict[int, float]) -> None:
        if at == "exchange" and session._call == FAILS_AT:
            happen(what, names, rank)
        start(session, sums)

    for step in range(1, STEPS + 1):
        try:
            loss = model.loss(tokens_of(step, rank))
            if at == "backward" and step == FAILS_AT:
                happen(what, names, rank)
            loss.backward()
            with mock.patch.object(RankSession, "start", starting):
                optimizer.step()
            optimizer.zero_grad()
        except Exception as error:
            return Run(after, f"{type(error).__name__}: {error}", optimizer.state_digests())
        after.append(optimizer.state_digests())
    return Run(after)


def tell(case: Case) -> tuple[list[Run], int]:
    """Runs ranks on two hosts; also how many packets were lost. Frozen ranks go on when all others have ended."""
    first, second = range(RANKS // 2), range(RANKS // 2, RANKS)
    with Link() as link:
        ranks = LocalRanks(RANKS, init=False)
        try:
            ranks.start(train, link.names, *case)
            outcomes = ranks.collect(100.0, first)
            for rank in second if "freezes" in case[1] else ():
                os.kill(ranks.processes[rank].pid, signal.SIGCONT)
            outcomes += ranks.collect(100.0, second)
            lost = dropped(link.names)
        finally:
            ranks.close()
    assert not any(outcome.error for outcome in outcomes), outcomes
    return [outcome.value for outcome in outcomes], lost


@needs_namespaces
def test_survivors_end_in_time_with_the_last_finished_step_and_a_bad_link_changes_no_bit() -> None:
    """All runs side by side: most of each is waiting for a time-out."""
    cases = (WHOLE, *LOST, *SURVIVED)
    with ThreadPoolExecutor(4) as threads:
        told = dict(zip(cases, threads.map(tell, cases), strict=True))
    whole, _ = told[WHOLE]
    assert all(len(run.after) == STEPS for run in whole)
    for case in SURVIVED:
        bad, lost = told[case]
        assert bad == whole, case
        assert (lost > 0) == ("loses" in case[1])
    for case in LOST:
        for rank, (run, unharmed) in enumerate(zip(told[case][0], whole, strict=True)):
            assert run.after == unharmed.after[: FAILS_AT - 1] and run.left == run.after[-1], (case, rank, run.error)
            if case[0] == "backward":  # in FSDP2's own collective: its error, after its time-out
                assert run.error.startswith("RuntimeError"), (rank, run.error)
                continue
            assert run.error.startswith("RankError: the verdict of step 4: "), run.error
            if rank < 2:
                assert f"rank 2, 3 on {HOSTS[1]} did not take part within 5 s (seen from rank {rank} on" in run.error
            elif case[1] == "the link dies":
                seen = f"rank 0 on {HOSTS[0]} did not take part within 5 s (seen from rank {rank} on {HOSTS[1]}; "
                assert f"{seen}the roll call of rank 0 on {ADDRESSES[0]} could not be reached" in run.error, run.error
                unknown = f"nothing is known of rank 1 on {HOSTS[0]}, rank {5 - rank} on {HOSTS[1]})"
                assert unknown in run.error, run.error


def test_hosts_are_named_where_there_are_several() -> None:
    assert Hosts({0: "a", 1: "a"}).rank(1) == "rank 1", "one host needs no name"
    assert Hosts({0: "a", 1: "b", 2: "a", 3: "b"}).ranks([0, 1, 2, 9]) == "rank 0, 2 on a, rank 1 on b, rank 9"


# ---- the link is cut, at every kind of wait ----------------------------------------------------------------------

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
    rank = join_world(names, PATIENT)
    with cut_at(point if rank == cuts else "", lambda: cut(names, how, cuts)) as come_to:
        error = error_of(lambda: train_and_save(come_to, folder))
    dist.destroy_process_group()
    return error


CUTS = [  # where, how, and on which side
    *(("exchange", "down", 0), ("step", "silent", 1), ("save", "silent", 0), ("second message of save()", "down", 1)),
    *(("construction", "down", 0), ("roll call", "silent", 1)),
]


def tell_of_cut(folder: Path, case: tuple[str, str, int]) -> list[Outcome]:
    with Link() as link:
        ranks = LocalRanks(2, init=False)
        try:
            return ranks.outcomes(life, link.names, str(folder / case[0]), *case, limit=100.0)
        finally:
            ranks.close()


ABSENT = f"rank 1 on {HOSTS[1]} did not take part within 5 s (seen from rank 0 on {HOSTS[0]})"
NOT_REACHED = f"the roll call of rank 0 on {ADDRESSES[0]} could not be reached"
EXPECTED = {
    "construction": ("the group of ranks 0, 1 was not made within 5 s",) * 2,
    "roll call": (ABSENT, f"the roll call of rank 0 on {ADDRESSES[0]} was not reached"),
}


@needs_namespaces
def test_both_ranks_end_in_time(tmp_path: Path) -> None:
    """Side by side: most of each is waiting for a time-out."""
    with ThreadPoolExecutor(6) as threads:
        told = list(threads.map(partial(tell_of_cut, tmp_path), CUTS))
    for (point, *_), outcomes in zip(CUTS, told, strict=True):
        assert not any(outcome.error for outcome in outcomes), outcomes
        for outcome, words in zip(outcomes, EXPECTED.get(point, (ABSENT, NOT_REACHED)), strict=True):
            assert "RankError" in outcome.value and words in outcome.value, point
            assert point != "construction" or "GLOO_SOCKET_IFNAME" in outcome.value


# The library's users let the error end the program: what torch destroys then must not wait for the other host.
PROGRAM = f"""
import sys, torch
from superoffload import AdamW
from tests.support.two_hosts import cut, join_world
names = tuple(sys.argv[1:])
rank = join_world(names, {PATIENT})
weight = torch.nn.Parameter(torch.ones(100))
optimizer = AdamW([weight], rank_timeout={TIMEOUT})
for step in range(5):
    if step == 3 and rank == 0:
        cut(names, "silent", 0)
    weight.grad = torch.ones(100)
    optimizer.step()
"""


@needs_namespaces
def test_the_program_ends_in_time() -> None:
    with Link() as link:
        command = [sys.executable, "-c", PROGRAM, *link.names]
        worlds = [{**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"} for rank in range(2)]
        programs = [subprocess.Popen(command, env=world, stderr=subprocess.PIPE, text=True) for world in worlds]
        try:
            said = [program.communicate(timeout=100.0) for program in programs]
        finally:
            for program in programs:
                program.kill()
        assert [program.returncode for program in programs] == [1, 1], said
        assert all("RankError: the verdict of step 4" in error for _, error in said), said
