"""Reads the files in which Linux describes a machine, below a root that tests replace; a missing file gives None."""

from __future__ import annotations

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
