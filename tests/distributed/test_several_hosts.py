"""Four ranks on two hosts: the link slows, loses packets or dies in the middle of a step, a host freezes. Those
that still run end in time, with the names of the lost ranks and their hosts, and with the state of the last finished
step."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from superoffload import AdamW
from superoffload.distributed.hosts import Hosts
from superoffload.distributed.session import RankSession
from tests.convergence.local_ranks import LocalRanks
from tests.support.rank_processes import BF16, error_of, net, shard, tokens_of
from tests.support.two_hosts import ADDRESSES, HOSTS, Link, cut, dropped, join_world, missing_for_namespaces, slow

needs_namespaces = pytest.mark.skipif(missing_for_namespaces() is not None, reason=str(missing_for_namespaces()))

TIMEOUT = 5.0  # ours
OF_TORCH = 8.0  # the time-out of torch.distributed's own collectives
STEPS, FAILS_AT = 6, 4


@dataclass
class Run:
    """What a rank has seen. ``after``: digests of its state after each finished step; ``left``: after the error."""

    after: list[dict[str, str]] = field(default_factory=list)
    error: str = ""
    left: dict[str, str] = field(default_factory=dict)


@contextmanager
def before_the_verdict(step: int, action: Callable[[], None]) -> Iterator[None]:
    """Runs the action in the middle of a step: all is stepped, and the message for the verdict is still to be sent."""
    start = RankSession.start

    def starting(session: RankSession, sums: dict[int, float]) -> None:
        if session._call == step:
            action()
        start(session, sums)

    with mock.patch.object(RankSession, "start", starting):
        yield


def mesh_of_hosts() -> DeviceMesh:
    """One row of ranks per host. The groups that ``init_device_mesh`` makes would wait half an hour."""
    mesh = torch.arange(dist.get_world_size()).view(2, -1)
    groups = [
        dist.new_subgroups_by_enumeration(rows.tolist(), timeout=timedelta(seconds=OF_TORCH))[0]
        for rows in (mesh.T, mesh)
    ]
    return DeviceMesh.from_group(groups, "cpu", mesh, mesh_dim_names=("replicas", "shards"))


def train(names: tuple[str, ...], at: str, trouble: Callable[[tuple[str, ...], int], None]) -> Run:
    """Hosts hold replicas of each other's shards (HSDP). ``trouble`` is called with the rank at the point ``at``."""
    rank = join_world(names, OF_TORCH)
    model = shard(net(torch.bfloat16, width=40), mesh_of_hosts(), BF16)
    options: dict[str, Any] = {"speculation": "always", "threads": 1}
    optimizer = AdamW(model.parameters(), model=model, max_grad_norm=0.5, rank_timeout=TIMEOUT, **options)
    run = Run()
    for step in range(1, STEPS + 1):
        try:
            if at == "backward" and step == FAILS_AT:
                loss = model.loss(tokens_of(step, rank))
                trouble(names, rank)
                loss.backward()
            else:
                model.loss(tokens_of(step, rank)).backward()
            with before_the_verdict(FAILS_AT if at == "exchange" else 0, lambda: trouble(names, rank)):
                optimizer.step()
            optimizer.zero_grad()
        except Exception as error:
            run.error = f"{type(error).__name__}: {error}"
            run.left = optimizer.state_digests()
            return run
        run.after.append(optimizer.state_digests())
    return run


# ---- what happens, on a rank ----------------------------------------------------------------------------------------


def nothing(names: tuple[str, ...], rank: int) -> None:
    pass


def the_link_dies(names: tuple[str, ...], rank: int) -> None:
    if rank == 0:
        cut(names, "silent", 0)


def the_second_host_freezes(names: tuple[str, ...], rank: int) -> None:
    if rank >= dist.get_world_size() // 2:
        os.kill(os.getpid(), signal.SIGSTOP)


def the_link_slows(names: tuple[str, ...], rank: int) -> None:
    if rank == 0:
        slow(names, megabits=5, queue=1 << 20)


def the_link_loses_packets(names: tuple[str, ...], rank: int) -> None:
    if rank == 0:
        slow(names, megabits=20, queue=6000)


# ---- tests ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    runs: list[Run]
    dropped: int


RANKS = 4
Case = tuple[str, Callable[[tuple[str, ...], int], None]]
LOST = [(at, trouble) for at in ("backward", "exchange") for trouble in (the_link_dies, the_second_host_freezes)]
SURVIVED: list[Any] = [the_link_slows, the_link_loses_packets]
CASES: list[Case] = [("", nothing), *LOST, *(("backward", trouble) for trouble in SURVIVED)]


def tell(case: Case) -> Told:
    """Runs ranks on two hosts. Frozen ones go on when all others have ended."""
    at, trouble = case
    first, second = range(2), range(2, RANKS)
    with Link() as link:
        ranks = LocalRanks(RANKS, init=False)
        try:
            ranks.start(train, link.names, at, trouble)
            outcomes = ranks.collect(100.0, first)
            for rank in second if trouble is the_second_host_freezes else ():
                os.kill(ranks.processes[rank].pid, signal.SIGCONT)
            outcomes += ranks.collect(100.0, second)
            lost = dropped(link.names)
        finally:
            ranks.close()
    assert not any(outcome.error for outcome in outcomes), outcomes
    return Told([outcome.value for outcome in outcomes], lost)


@pytest.fixture(scope="module")
def told() -> Iterator[Callable[[Case], Told]]:
    """All runs, side by side once one is asked for: most of each is waiting for a time-out."""
    started: dict[Case, Future[Told]] = {}
    with ThreadPoolExecutor(4) as threads:

        def ask(case: Case) -> Told:
            if not started:
                started.update({one: threads.submit(tell, one) for one in CASES})
            return started[case].result()

        yield ask


@needs_namespaces
@pytest.mark.parametrize(("at", "trouble"), LOST, ids=lambda value: getattr(value, "__name__", value))
def test_survivors_end_in_time_with_the_last_finished_step(at: str, trouble: Any, told: Callable[[Case], Told]) -> None:
    runs, whole = told((at, trouble)).runs, told(("", nothing)).runs
    for rank, (run, unharmed) in enumerate(zip(runs, whole, strict=True)):
        assert run.after == unharmed.after[: FAILS_AT - 1] and run.left == run.after[-1], (rank, run.error)
        if at == "backward":  # in FSDP2's own collective: its error, after its time-out
            assert run.error.startswith("RuntimeError"), (rank, run.error)
            continue
        assert run.error.startswith("RankError: the verdict of step 4: "), run.error
        if rank < 2:
            assert f"rank 2, 3 on {HOSTS[1]} did not take part within 5 s (seen from rank {rank} on" in run.error
        elif trouble is the_link_dies:
            words = f"rank 0 on {HOSTS[0]} did not take part within 5 s (seen from rank {rank} on {HOSTS[1]}; the roll "
            assert f"{words}call of rank 0 on {ADDRESSES[0]} could not be reached" in run.error, run.error
            assert f"nothing is known of rank 1 on {HOSTS[0]}, rank {5 - rank} on {HOSTS[1]})" in run.error, run.error


@needs_namespaces
@pytest.mark.parametrize("trouble", SURVIVED, ids=lambda value: value.__name__)
def test_a_bad_link_changes_no_bit(trouble: Any, told: Callable[[Case], Told]) -> None:
    bad, good = told(("backward", trouble)), told(("", nothing))
    assert [run.error for run in bad.runs] == [""] * RANKS
    assert [run.after for run in bad.runs] == [run.after for run in good.runs]
    assert all(len(run.after) == STEPS for run in good.runs)
    assert (bad.dropped > 0) == (trouble is the_link_loses_packets)


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
    assert Hosts({}).ranks([3, 4]) == "rank 3, 4"
    assert Hosts({0: "a", 1: "a"}).rank(1) == "rank 1", "one host needs no name"
    several = Hosts({0: "a", 1: "b", 2: "a", 3: "b"})
    assert several.rank(3) == "rank 3 on b"
    assert several.ranks([0, 1, 2, 9]) == "rank 0, 2 on a, rank 1 on b, rank 9"
