"""What a reader needs to know about the machine and the code to judge a measurement or to repeat it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from superoffload.memory import largest_cache_bytes
from superoffload.reporting.machine import machine_facts

_ROOT = Path(__file__).resolve().parents[2]
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def benchmark_machine_facts() -> dict[str, Any]:
    """The machine, and how busy it was when the measurement began."""
    return {
        **machine_facts(),
        "largest_cache_mib": round(largest_cache_bytes() / 2**20, 1),
        "page_bytes": os.sysconf("SC_PAGE_SIZE"),
        "transparent_huge_pages": huge_page_mode(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def commit() -> str:
    """The commit of the checkout this package runs from, with "+changes" if files differ; "unknown" elsewhere."""
    if not (_ROOT / ".git").exists():
        return "unknown"
    head = _git("rev-parse", "HEAD")
    if not head:
        return "unknown"
    return head + ("+changes" if _git("status", "--porcelain") else "")


def _git(*arguments: str) -> str:
    try:
        shown = subprocess.run(
            ["git", "-C", str(_ROOT), *arguments], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return shown.stdout.strip()


def huge_page_mode() -> str:
    """always, madvise or never; unknown where the system does not tell."""
    try:
        text = _HUGE_PAGES.read_text()
    except OSError:
        return "unknown"
    chosen = [word.strip("[]") for word in text.split() if word.startswith("[")]
    return chosen[0] if chosen else "unknown"


def available_memory_bytes() -> int | None:
    """What can be allocated without swapping: the system's own estimate, within the control group's limit."""
    rooms = [room for room in (_meminfo_available(), control_group_room()) if room is not None]
    return min(rooms, default=None)


def _meminfo_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def control_group_room() -> int | None:
    """Memory left in this process's control group (version 2, or 1's root); None without a limit."""
    pairs = (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    )
    for limit_path, used_path in pairs:
        try:
            limit, used = Path(limit_path).read_text().strip(), Path(used_path).read_text().strip()
        except OSError:
            continue
        if limit.isdigit() and int(limit) < 1 << 60:  # "max", or a number beyond all memory: no limit
            return max(0, int(limit) - int(used))
    return None
