"""Reads the files in which Linux describes a machine, below a root that tests replace; a missing file gives None."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNITS = {"K": 10, "M": 20, "G": 30}  # powers of two
_UNKNOWN_CACHE = 32 << 20


@dataclass(frozen=True)
class System:
    """Reads `/proc` and `/sys` below `root`."""

    root: Path = Path("/")

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str | None:
        try:
            return self.path(name).read_text(encoding="utf-8", errors="replace").strip("\0 \n\t")
        except OSError:
            return None

    def number(self, name: str) -> int | None:
        return as_number(self.text(name))

    def names(self, folder: str) -> list[str]:
        """Lists a folder's entries, sorted; an empty list if the folder does not exist."""
        try:
            return sorted(entry.name for entry in self.path(folder).iterdir())
        except OSError:
            return []

    def fields(self, name: str) -> dict[str, str]:
        """Reads `key: value` lines; the first of equal keys counts."""
        values: dict[str, str] = {}
        for line in (self.text(name) or "").splitlines():
            key, colon, value = line.partition(":")
            if colon:
                values.setdefault(key.strip(), value.strip())
        return values


def as_number(text: str | None) -> int | None:
    """Reads the leading whole number of a text such as `65536 kB`."""
    words = (text or "").split()
    try:
        return int(words[0], 0) if words else None
    except ValueError:
        return None


def largest_cache_bytes(system: System) -> int:
    """Returns the size of the first processor's largest data cache; 32 MiB if the system does not tell."""
    folder = "/sys/devices/system/cpu/cpu0/cache"
    sizes = []
    for name in system.names(folder):
        size = system.text(f"{folder}/{name}/size") or ""
        if system.text(f"{folder}/{name}/type") != "Instruction":
            sizes.append((as_number(size.rstrip("KMG")) or 0) << _UNITS.get(size[-1:], 0))
    return max(sizes, default=0) or _UNKNOWN_CACHE


def parse_cpu_list(text: str | None) -> list[int]:
    """Parses sets of processors as Linux writes them: `0-3,8`."""
    cpus: list[int] = []
    for part in (text or "").split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit():
            cpus.extend(range(int(first), int(last or first) + 1))
    return cpus


def format_cpu_list(cpus: list[int]) -> str:
    """Writes a set of processors as ranges, so that a hundred processors stay short."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and cpu == parts[-1][-1] + 1:
            parts[-1][1:] = [cpu]
        else:
            parts.append([cpu])
    return ",".join("-".join(map(str, part)) for part in parts)


# ---- limits of this process's control group (container, batch job) and of all groups around it ----------------------

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
