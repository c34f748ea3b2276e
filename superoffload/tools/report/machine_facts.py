"""Facts about the machine and the software that a reader needs to judge or repeat a result."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from superoffload import __version__, kernels
from superoffload.host.processors import allowed_cpus
from superoffload.host.system import System
from superoffload.tools.doctor.cpu import cpu_name

_PACKAGES = ("torch", "numpy")


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


def version_facts() -> dict[str, str]:
    facts = {"superoffload": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "not installed"
    return facts


def memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None
