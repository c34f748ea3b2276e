"""Chooses the processors of the worker threads: those that the process may use, shared with other ranks on the node."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from superoffload.host.system import System, cpu_quota, parse_cpu_list

# These stay free beside a device for the training thread, autograd's and the two that follow copies.
_LEFT_BESIDE_DEVICE = 2
_TOO_FEW_TO_LEAVE = 4


def allowed_cpus() -> list[int]:
    """Lists the processors this process may run on (taskset, cgroup cpusets, SLURM), in ascending order."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def worker_cpus(threads: int | None, mine: Sequence[int] | None = None, *, beside_device: bool = False) -> list[int]:
    """Returns one entry per worker thread: the processor it is bound to, or -1 for threads beyond the processors.

    ``mine``: this rank's share of the node (None: all that the process may use). ``beside_device``: the model computes
    on an accelerator.
    """
    from superoffload.host.numbers import check_threads  # loads torch, which the doctor must do without

    check_threads("threads", threads)
    allowed = list(mine) if mine is not None else allowed_cpus()
    if threads is None:
        return allowed[: thread_limit(len(allowed), os.environ, cpu_quota(System()), beside_device=beside_device)]
    return allowed[:threads] + [-1] * (threads - len(allowed))


@dataclass(frozen=True)
class RankOnNode:
    """Describes a rank to the others. ``preferred``: the processors next to its GPU, where they are known."""

    host: str
    rank: int
    cpus: tuple[int, ...]
    preferred: tuple[int, ...] = ()


def share_cpus(ranks: Sequence[RankOnNode], me: int) -> list[int]:
    """Returns the processors of rank ``me``: its own, and an even share of those that other ranks may use too.

    Every rank computes the same division from the same list, so no processor is given twice. A processor goes to a rank
    that prefers it (its GPU's NUMA node) before one that does not, then to the rank with the fewest. Ranks get runs of
    neighbours, which share caches. If there are more ranks than processors, each rank without one gets one of another
    rank, as evenly as possible; more threads would only take turns on it.
    """
    mine = next(rank for rank in ranks if rank.rank == me)
    here = sorted((rank for rank in ranks if rank.host == mine.host), key=lambda rank: rank.rank)
    given: dict[int, list[int]] = {rank.rank: [] for rank in here}
    wanted = {cpu: [rank for rank in here if cpu in rank.cpus] for cpu in sorted({c for r in here for c in r.cpus})}
    for users in _runs(wanted):
        _divide(users, wanted[users[0]], given)
    _share_with_others([rank for rank in here if not given[rank.rank]], given)
    return sorted(given[me])


def is_crowded(ranks: Sequence[RankOnNode]) -> bool:
    """Tells whether a host has more ranks than processors, so that nothing runs beside a training thread there."""
    hosts: dict[str, list[RankOnNode]] = {}
    for rank in ranks:
        hosts.setdefault(rank.host, []).append(rank)
    return any(len(here) > len({cpu for rank in here for cpu in rank.cpus}) for here in hosts.values())


def _runs(wanted: Mapping[int, Sequence[RankOnNode]]) -> list[list[int]]:
    """Groups processors that the same ranks may use and prefer, in ascending order; the most constrained come first."""
    groups: dict[tuple[tuple[int, bool], ...], list[int]] = {}
    for cpu, users in wanted.items():
        groups.setdefault(tuple((rank.rank, cpu in rank.preferred) for rank in users), []).append(cpu)
    return [groups[key] for key in sorted(groups, key=lambda key: (len(key), key))]


def _divide(cpus: Sequence[int], users: Sequence[RankOnNode], given: dict[int, list[int]]) -> None:
    """Gives even runs of ``cpus`` to the ranks that prefer them, else to all; ranks with few processors get more."""
    prefer = [rank for rank in users if cpus[0] in rank.preferred] or list(users)
    counts = {rank.rank: 0 for rank in prefer}
    for _ in cpus:
        fewest = min(counts, key=lambda rank: (len(given[rank]) + counts[rank], rank))
        counts[fewest] += 1
    start = 0
    for rank, count in counts.items():
        given[rank].extend(cpus[start : start + count])
        start += count


def _share_with_others(ranks: Sequence[RankOnNode], given: dict[int, list[int]]) -> None:
    """Gives each rank without a processor of its own the one with the fewest users that it may use."""
    users = Counter(cpu for cpus in given.values() for cpu in cpus)
    for rank in ranks:
        cpu = min(rank.cpus, key=lambda cpu: (users[cpu], cpu))
        given[rank.rank].append(cpu)
        users[cpu] += 1


def thread_limit(cpus: int, environment: Mapping[str, str], quota: float | None, *, beside_device: bool = False) -> int:
    """Returns how many threads the environment allows on ``cpus`` processors; at least one.

    Beside a device, the threads that feed and follow it get two processors of six or more, one of five.

    OMP_NUM_THREADS counts, except for the 1 that torchrun sets by default: it keeps every library from starting as many
    threads as there are processors, and our shares of the processors already avoid that.
    """
    limit = cpus
    by_slurm = _number(environment.get("SLURM_CPUS_PER_TASK"))
    if by_slurm is not None:
        limit = min(limit, by_slurm)
    if quota is not None:
        limit = min(limit, max(1, int(quota)))
    if beside_device and limit > _TOO_FEW_TO_LEAVE:
        limit = max(limit - _LEFT_BESIDE_DEVICE, _TOO_FEW_TO_LEAVE)
    by_user = _number(environment.get("OMP_NUM_THREADS"))
    if by_user is not None and not set_by_torchrun("OMP_NUM_THREADS", environment):
        limit = min(limit, by_user)
    return max(1, limit)


def set_by_torchrun(name: str, environment: Mapping[str, str]) -> bool:
    """Tells whether torchrun has set the limit because the user has set none."""
    return name == "OMP_NUM_THREADS" and _number(environment.get(name)) == 1 and "TORCHELASTIC_RUN_ID" in environment


def _number(text: str | None) -> int | None:
    """Reads the first number of a list such as OMP_NUM_THREADS=8,2; None if it is not a positive number."""
    first = (text or "").split(",")[0].strip()
    return int(first) if first.isdigit() and int(first) > 0 else None


def cpus_near_gpu(bus_id: str, system: System | None = None) -> tuple[int, ...]:
    """Lists the processors next to a GPU, by its PCI bus id ("0000:17:00.0"); empty if unknown."""
    text = (system or System()).text(f"/sys/bus/pci/devices/{bus_id.lower()}/local_cpulist")
    return tuple(parse_cpu_list(text))
