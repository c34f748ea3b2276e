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


def machine_facts() -> dict[str, Any]:
    return {
        "cpu": cpu_name(System()),
        "architecture": platform.machine(),
        "cpus_usable": len(allowed_cpus()),
        "memory_gib": memory_gib(),
        "system": f"{platform.system()} {platform.release()}",
        "kernel_isa": kernels.current_isa(),
        "kernel_isas_available": kernels.available_isas(),
    }


def benchmark_machine_facts() -> dict[str, Any]:
    """Returns facts about the machine and its load when the measurement began."""
    return {
        **machine_facts(),
        "largest_cache_mib": round(largest_cache_bytes(System()) / 2**20, 1),
        "page_bytes": os.sysconf("SC_PAGE_SIZE"),
        "transparent_huge_pages": huge_page_mode(System()) or "unknown",
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def version_facts() -> dict[str, str]:
    packages = {package: installed_version(package) or "not installed" for package in _PACKAGES}
    return {"superoffload": __version__, "python": platform.python_version(), **packages}


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cpu_name(system: System) -> str:
    fields = system.fields("/proc/cpuinfo")
    if fields.get("model name"):
        return fields["model name"]
    return f"ARM implementer {fields.get('CPU implementer')} part {fields.get('CPU part')}"


def huge_page_mode(system: System) -> str | None:
    """Returns the mode of transparent huge pages: always, madvise or never; None if the system does not tell."""
    mode = system.text("/sys/kernel/mm/transparent_hugepage/enabled") or ""
    return next((word.strip("[]") for word in mode.split() if word.startswith("[")), None)


def memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None


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
