"""What a reader needs to know about the machine and the code to judge a measurement or to repeat it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from superoffload.doctor.control_groups import memory_limit
from superoffload.doctor.system import System
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
    limit = memory_limit(System())
    room = None if limit is None else max(0, limit[0] - limit[1])
    return min((each for each in (_meminfo_available(), room) if each is not None), default=None)


def _meminfo_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
