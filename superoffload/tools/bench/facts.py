"""What a reader needs to know about the machine and the code to judge a measurement or to repeat it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from superoffload.host.system import System, largest_cache_bytes
from superoffload.tools.doctor.host_memory import huge_page_mode
from superoffload.tools.report.machine_facts import machine_facts

_ROOT = Path(__file__).resolve().parents[3]


def benchmark_machine_facts() -> dict[str, Any]:
    """The machine, and how busy it was when the measurement began."""
    return {
        **machine_facts(),
        "largest_cache_mib": round(largest_cache_bytes(System()) / 2**20, 1),
        "page_bytes": os.sysconf("SC_PAGE_SIZE"),
        "transparent_huge_pages": huge_page_mode(System()) or "unknown",
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
