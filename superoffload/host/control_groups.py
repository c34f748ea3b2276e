"""Reads the limits of this process's control group (container, batch job) and of all groups around it."""

from __future__ import annotations

from collections.abc import Iterator

from superoffload.host.system import System, as_number

_NO_LIMIT = 1 << 60  # version 1 writes a number beyond all memory where there is no limit


def _own_path(system: System, controller: str) -> str:
    """Finds the group's path below the mount; version 2 has one line `0::/path` for all controllers."""
    for line in (system.text("/proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller == controllers or controller in controllers.split(","):
            return path.strip("/")
    return ""


def _levels(path: str) -> Iterator[str]:
    """Lists the group, its parent, and so on up to the mount: the tightest limit counts."""
    parts = path.split("/") if path else []
    for depth in range(len(parts), -1, -1):
        yield "/".join(parts[:depth])


def memory_limit(system: System) -> tuple[int, int] | None:
    """Returns (limit, used) in bytes of the group with the least room; None without a limit."""
    found: list[tuple[int, int]] = []
    kinds = (
        ("", "/sys/fs/cgroup", "memory.max", "memory.current"),
        ("memory", "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    )
    for controller, mount, limit_name, used_name in kinds:
        for level in _levels(_own_path(system, controller)):
            limit = system.number(f"{mount}/{level}/{limit_name}")  # "max" is no number
            if limit is not None and limit < _NO_LIMIT:
                found.append((limit, system.number(f"{mount}/{level}/{used_name}") or 0))
    return min(found, key=lambda pair: pair[0] - pair[1], default=None)


def usable_memory(system: System) -> int | None:
    """Returns the bytes that can be allocated without swapping: the system's estimate, within the group's limit."""
    free, limit = as_number(system.fields("/proc/meminfo").get("MemAvailable")), memory_limit(system)
    rooms = [] if free is None else [free << 10]
    rooms += [max(0, limit[0] - limit[1])] if limit else []
    return min(rooms, default=None)


def cpu_quota(system: System) -> float | None:
    """Returns the number of processors whose time the group may use; None without a limit."""
    quotas: list[float] = []
    for level in _levels(_own_path(system, "")):
        quota, _, period = (system.text(f"/sys/fs/cgroup/{level}/cpu.max") or "").partition(" ")
        if quota.isdigit() and (as_number(period) or 0) > 0:
            quotas.append(int(quota) / int(period))
    for level in _levels(_own_path(system, "cpu")):
        us = system.number(f"/sys/fs/cgroup/cpu/{level}/cpu.cfs_quota_us")
        period_us = system.number(f"/sys/fs/cgroup/cpu/{level}/cpu.cfs_period_us")
        if us is not None and us > 0 and period_us:
            quotas.append(us / period_us)
    return round(min(quotas), 2) if quotas else None
