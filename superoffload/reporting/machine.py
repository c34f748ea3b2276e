"""Facts about the machine and the software that a reader needs to judge or repeat a result."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from superoffload import __version__, kernels

_PACKAGES = ("torch", "numpy")


def machine_facts() -> dict[str, Any]:
    return {
        "cpu": cpu_name(),
        "architecture": platform.machine(),
        "cpus_usable": usable_cpus(),
        "memory_gib": memory_gib(),
        "system": f"{platform.system()} {platform.release()}",
        "kernel_isa": kernels.current_isa(),
        "kernel_isas_available": kernels.available_isas(),
    }


def version_facts() -> dict[str, str]:
    facts = {"superoffload": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "not installed"
    return facts


def usable_cpus() -> int:
    """CPUs this process may run on, which in a container or under taskset is fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    fields: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "cpu model") and value.strip():
            return value.strip()
        fields.setdefault(key.strip(), value.strip())
    if "CPU part" in fields:  # ARM's kernel gives numbers instead of a name
        return f"ARM implementer {fields.get('CPU implementer', '?')} part {fields['CPU part']}"
    return platform.processor() or platform.machine()


def memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None
