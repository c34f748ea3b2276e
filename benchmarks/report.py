"""Tells what a reader needs to judge or repeat a result: machine, software, sources; and writes results as JSON."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from superoffload.tools.output import naming_write_errors

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ("superoffload", "csrc", "setup.py")
_SUFFIXES = frozenset({".py", ".pyi", ".cpp", ".h", ".inl", ".cu", ".cuh", ".txt"})
_APART = ("csrc/tests/", "superoffload/tools/")  # in no result


def facts() -> dict[str, Any]:
    """Returns the head of a report, with the machine's load when the measurement began."""
    from superoffload import __version__, kernels
    from superoffload.host.processors import allowed_cpus
    from superoffload.host.system import System, largest_cache_bytes

    system = System()
    fields = system.fields("/proc/cpuinfo")
    arm = f"ARM implementer {fields.get('CPU implementer')} part {fields.get('CPU part')}"
    pages = (system.text("/sys/kernel/mm/transparent_hugepage/enabled") or "").split()
    machine = {
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
    versions = {"superoffload": __version__, "python": platform.python_version(), **installed("torch", "numpy")}
    return {"machine": machine, "versions": versions, "commit": commit()}


def installed(*packages: str) -> dict[str, str]:
    """Returns the versions of those that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Returns the commit of the checkout this package runs from, plus "+changes" if files differ; else "unknown"."""
    head = _git("rev-parse", "HEAD") if (ROOT / ".git").exists() else ""
    return head + ("+changes" if _git("status", "--porcelain") else "") if head else "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


@cache
def digest_of(parts: tuple[str, ...] = PACKAGE) -> str:
    """Digests the sources below ``parts``, also without git: folders and files of the checkout; one may be missing."""
    digest = hashlib.sha256()
    for path in sorted(_files(parts)):
        contents = path.read_bytes()
        digest.update(f"{path.relative_to(ROOT).as_posix()}\0{len(contents)}\0".encode())
        digest.update(contents)
    return digest.hexdigest()[:16]


def _files(parts: Iterable[str]) -> Iterator[Path]:
    for part in parts:
        folder = ROOT / part
        if folder.is_file():
            yield folder
        for path in folder.rglob("*"):
            if path.suffix in _SUFFIXES and not path.relative_to(ROOT).as_posix().startswith(_APART):
                yield path


def write_results(path: str | os.PathLike[str], values: Mapping[str, Any]) -> None:
    """Writes a line per key, and per row of a table; whole or not at all, even if the process ends. No NaN."""
    lines = []
    for key, value in values.items():
        text = json.dumps(value, allow_nan=False)
        if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            rows = ",\n".join(f"  {json.dumps(each, allow_nan=False)}" for each in value)
            text = f"[\n{rows}\n ]"
        lines.append(f" {json.dumps(key)}: {text}")
    target, text = Path(path), "{\n" + ",\n".join(lines) + "\n}\n"
    with naming_write_errors(path):
        if target.is_symlink() or (target.exists() and not target.is_file()):  # a link, a device: written through
            target.write_text(text, encoding="utf-8")
            return
        new = target.with_name(f"{target.name}.new")
        new.write_text(text, encoding="utf-8")
        os.replace(new, target)
