"""Processors for worker threads: no two ranks share one, and limits set from outside hold."""

from __future__ import annotations

import os
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from superoffload import AdamW
from superoffload.host.processors import (
    RankOnNode,
    allowed_cpus,
    cpus_near_gpu,
    is_crowded,
    share_cpus,
    thread_limit,
    worker_cpus,
)
from superoffload.host.system import largest_cache_bytes
from tests.support.fake_machine import make_machine
from tests.support.rank_processes import net, on_ranks, optimizer_of


def shares(ranks: list[RankOnNode]) -> list[list[int]]:
    return [share_cpus(ranks, rank.rank) for rank in ranks]


EIGHT = tuple(range(8))


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([("a", EIGHT), ("a", EIGHT)], [[0, 1, 2, 3], [4, 5, 6, 7]]),  # in runs of neighbours
        ([("a", EIGHT)] * 3, [[0, 1, 2], [3, 4, 5], [6, 7]]),
        ([("a", (0, 1)), ("a", (2, 3, 6))], [[0, 1], [2, 3, 6]]),  # divided by a launcher already
        ([("a", (0, 1, 2, 3)), ("a", (2, 3))], [[0, 1], [2, 3]]),
        ([("a", (0, 1)), ("b", (0, 1))], [[0, 1], [0, 1]]),  # of other hosts
        ([("a", EIGHT, (4, 5, 6, 7)), ("a", EIGHT, (0, 1, 2, 3))], [[4, 5, 6, 7], [0, 1, 2, 3]]),  # next to its GPU
        ([("a", (0, 1))] * 5, [[0], [1], [0], [1], [0]]),  # more ranks than processors
        ([("a", (0,)), ("a", (0,)), ("a", (0, 1))], [[0], [0], [1]]),
    ],
)
def test_shares(ranks: list[tuple[Any, ...]], expected: list[list[int]]) -> None:
    assert shares([RankOnNode(host, i, *cpus) for i, (host, *cpus) in enumerate(ranks)]) == expected


def test_crowded_is_a_host_with_more_ranks_than_processors() -> None:
    ranks = [RankOnNode(host, rank, (0, 1)) for rank, host in enumerate("aabbb")]
    assert not is_crowded(ranks[:4]) and is_crowded(ranks)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sets(st.integers(0, 12), min_size=1), st.sets(st.integers(0, 12)))
                , min_size=1, max_size=6))  # fmt: skip
def test_no_processor_is_given_twice_but_to_ranks_without_one(nodes: list[tuple[str, set[int], set[int]]]) -> None:
    ranks = [RankOnNode(host, i, tuple(sorted(cpus)), tuple(near)) for i, (host, cpus, near) in enumerate(nodes)]
    divided = shares(ranks)
    for rank, mine in zip(ranks, divided, strict=True):
        assert mine and set(mine) <= set(rank.cpus)
    for (one, mine), (other, theirs) in combinations(zip(ranks, divided, strict=True), 2):
        if one.host == other.host and set(mine) & set(theirs):
            assert any(
                len(share) == 1 and is_taken(rank, ranks, divided) for rank, share in ((one, mine), (other, theirs))
            )


def is_taken(rank: RankOnNode, ranks: list[RankOnNode], divided: list[list[int]]) -> bool:
    """Whether all that ``rank`` may use is with other ranks."""
    pairs = zip(ranks, divided, strict=True)
    others = {cpu for other, share in pairs if other.host == rank.host and other is not rank for cpu in share}
    return set(rank.cpus) <= others


@pytest.mark.parametrize(
    ("cpus", "environment", "quota", "expected", "beside_device"),
    [
        (16, {}, None, 16, 14),
        (6, {}, None, 6, 4),
        (5, {}, None, 5, 4),  # not fewer than with four
        (4, {}, None, 4, 4),  # too few to leave any
        (16, {"OMP_NUM_THREADS": "4,2"}, None, 4, 4),
        (16, {"OMP_NUM_THREADS": "many"}, None, 16, 14),
        (16, {"OMP_NUM_THREADS": "8"}, None, 8, 8),  # threads, and there are processors besides
        (16, {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}, None, 16, 14),
        (16, {"OMP_NUM_THREADS": "2", "TORCHELASTIC_RUN_ID": "x"}, None, 2, 2),
        (16, {"SLURM_CPUS_PER_TASK": "5", "OMP_NUM_THREADS": "8"}, None, 5, 4),  # processors
        (16, {}, 8.0, 8, 6),
        (16, {}, 0.5, 1, 1),
    ],
)
def test_limits_of_threads(
    cpus: int, environment: dict[str, str], quota: float | None, expected: int, beside_device: int
) -> None:
    """Two processors are left beside a device."""
    assert thread_limit(cpus, environment, quota) == expected
    assert thread_limit(cpus, environment, quota, beside_device=True) == beside_device


@pytest.mark.parametrize(("device", "threads", "expected"), [(False, None, 16), (True, None, 14), (True, 16, 16)])
def test_an_optimizer_beside_a_device_leaves_two(
    device: bool, threads: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("superoffload.host.processors.allowed_cpus", lambda: list(range(16)))
    monkeypatch.setattr("superoffload.host.processors.cpu_quota", lambda system: None)
    monkeypatch.setattr("superoffload.optimizer.adamw_parts.on_device", lambda params: device)
    with AdamW(net(torch.float32).parameters(), threads=threads) as optimizer:
        assert optimizer._engine.pool.threads == expected  # type: ignore[attr-defined]  # the protocol has no count


def test_processors_next_to_a_gpu(tmp_path: Path) -> None:
    system = make_machine(tmp_path, {"/sys/bus/pci/devices/0000:17:00.0/local_cpulist": "0-2,8\n"})
    assert cpus_near_gpu("0000:17:00.0", system) == (0, 1, 2, 8)
    assert cpus_near_gpu("0000:99:00.0", system) == ()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux: sets processor affinity")
def test_taskset_is_respected() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert allowed_cpus() == worker_cpus(None) == [min(before)]
    finally:
        os.sched_setaffinity(0, before)


def thread_cpus() -> list[int]:
    with optimizer_of(net(torch.float32), threads=None) as optimizer:
        assert optimizer._ranks.setup.cpus is not None
        return optimizer._ranks.setup.cpus


def test_ranks_of_this_node_share_its_processors() -> None:
    first, second = on_ranks(2, thread_cpus)
    allowed = allowed_cpus()
    if len(allowed) >= 2:
        assert not set(first) & set(second) and sorted(first + second) == allowed
    else:
        assert first == second == allowed


def test_the_largest_cache_holds_data(tmp_path: Path) -> None:
    folder = "/sys/devices/system/cpu/cpu0/cache"
    sizes = {"index0": ("Data", "48K"), "index1": ("Instruction", "64M"), "index2": ("Unified", "2M")}
    files = {f"{folder}/{name}/type": f"{kind}\n" for name, (kind, _) in sizes.items()}
    files |= {f"{folder}/{name}/size": f"{size}\n" for name, (_, size) in sizes.items()}
    assert largest_cache_bytes(make_machine(tmp_path / "known", files, {})) == 2 << 20
    assert largest_cache_bytes(make_machine(tmp_path / "unknown", {}, {})) == 32 << 20, "large, to be safe"
