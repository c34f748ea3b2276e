"""Four ranks on two hosts: the link slows, loses packets or dies in the middle of a step, a host freezes. Those
that still run end in time, with the names of the lost ranks and their hosts, and with the state of the last finished
step."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from superoffload import AdamW
from superoffload.distributed.group import Hosts
from superoffload.distributed.session import RankSession
from tests.convergence.local_ranks import LocalRanks
from tests.support.rank_processes import BF16, error_of, net, shard, tokens_of
from tests.support.two_hosts import ADDRESSES, HOSTS, Link, cut, dropped, join_world, missing_for_namespaces, slow

needs_namespaces = pytest.mark.skipif(missing_for_namespaces() is not None, reason=str(missing_for_namespaces()))

TIMEOUT = 5.0  # ours
OF_TORCH = 8.0  # the time-out of torch.distributed's own collectives
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


def make_on(names: tuple[str, ...], device: str) -> str:
    """The error of an optimizer whose own group uses ``device``."""
    join_world(names, OF_TORCH)
    os.environ["GLOO_SOCKET_IFNAME"] = device
    return error_of(lambda: AdamW([torch.nn.Parameter(torch.ones(4))], rank_timeout=TIMEOUT))


@needs_namespaces
def test_a_network_that_the_other_host_is_not_on() -> None:
    with Link() as link, LocalRanks(2, init=False) as ranks:
        for error in ranks.run(make_on, link.names, "lo", limit=100.0):
            assert error.startswith("RankError") and "GLOO_SOCKET_IFNAME" in error
            assert "the group of ranks 0, 1 was not made within 5 s" in error


def test_hosts_are_named_where_there_are_several() -> None:
    assert Hosts({0: "a", 1: "a"}).rank(1) == "rank 1", "one host needs no name"
    assert Hosts({0: "a", 1: "b", 2: "a", 3: "b"}).ranks([0, 1, 2, 9]) == "rank 0, 2 on a, rank 1 on b, rank 9"
