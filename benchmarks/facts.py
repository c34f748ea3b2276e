"""Gathers facts about the machine and the software that a reader needs to judge or repeat a result."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from superoffload import __version__, kernels
from superoffload.host.processors import allowed_cpus
from superoffload.host.system import System, largest_cache_bytes

_PACKAGES = ("torch", "numpy")
_ROOT = Path(__file__).resolve().parents[1]


def benchmark_machine_facts() -> dict[str, Any]:
    """Returns facts about the machine and its load when the measurement began."""
    system = System()
    fields = system.fields("/proc/cpuinfo")
    arm = f"ARM implementer {fields.get('CPU implementer')} part {fields.get('CPU part')}"
    pages = (system.text("/sys/kernel/mm/transparent_hugepage/enabled") or "").split()
    return {
        "cpu": fields.get("model name") or arm,
        "architecture": platform.machine(),
        "cpus_usable": len(allowed_cpus()),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "kernel_isa": kernels.current_isa(),
        "kernel_isas_available": kernels.available_isas(),
        "largest_cache_mib": round(largest_cache_bytes(system) / 2**20, 1),
        "page_bytes": os.sysconf("SC_PAGE_SIZE"),
        "transparent_huge_pages": next((word.strip("[]") for word in pages if word.startswith("[")), "unknown"),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def version_facts() -> dict[str, str]:
    return {"superoffload": __version__, "python": platform.python_version(), **dict(map(_version, _PACKAGES))}


def _version(package: str) -> tuple[str, str]:
    try:
        return package, version(package)
    except PackageNotFoundError:
        return package, "not installed"


def commit() -> str:
    """Returns the commit of the checkout this package runs from, plus "+changes" if files differ; else "unknown"."""
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
