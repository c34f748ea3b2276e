"""Prints what machine this is before anything is built or measured; needs neither our package nor torch."""

from __future__ import annotations

import glob
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_COMMANDS = (
    ("nvidia-smi",),
    ("nvidia-smi", "topo", "-m"),
    ("nvidia-smi", "--query-gpu=name,memory.total,driver_version,pcie.link.gen.max,pcie.link.width.max,clocks.max.sm",
     "--format=csv"),
    ("nvcc", "--version"),
    ("compute-sanitizer", "--version"),
    ("lscpu",),
    ("numactl", "--hardware"),
    ("free", "-m"),
    ("df", "-h", "/tmp", "/dev/shm"),
)  # fmt: skip
_FILES = (
    "/proc/meminfo",
    "/sys/kernel/mm/transparent_hugepage/enabled",
    "/sys/devices/system/node/node*/cpulist",
    "/sys/devices/system/node/node*/meminfo",
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/cpu.max",
)
_PACKAGES = (
    "torch", "numpy", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-runtime", "nvidia-nccl-cu13",
    "setuptools", "pybind11", "ninja", "pytest", "pytest-timeout", "pytest-xdist", "hypothesis",
    "deepspeed", "torchao", "transformers", "matplotlib",
)  # fmt: skip
_SECONDS = 20.0


def brief() -> str:
    """Returns the same in a few lines."""
    gpu = _output(("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"))
    memory = next((line.split()[1] for line in _read("/proc/meminfo").splitlines() if line.startswith("MemTotal")), "0")
    cpu = next((line.split(":")[1].strip() for line in _output(("lscpu",)).splitlines() if "Model name" in line), "?")
    found = packages()
    named = [f"{name} {found[name]}" for name in ("torch", "setuptools", "pybind11") if name in found]
    return (
        f"GPU: {gpu.strip() or 'nvidia-smi finds none'}\n"
        f"CPU: {cpu}, {len(os.sched_getaffinity(0))} processors, {int(memory) >> 20} GiB\n"
        f"Python {platform.python_version()}, {', '.join(named) or 'no torch'}; nvcc: {shutil.which('nvcc')}"
    )


def in_full() -> Iterator[str]:
    """Yields everything, one piece at a time."""
    yield f"{platform.platform()}, Python {sys.version}, {sys.executable}"
    yield f"locked memory: {resource.getrlimit(resource.RLIMIT_MEMLOCK)}, locale {os.environ.get('LANG')}"
    yield "\n".join(f"{name} {found}" for name, found in packages().items())
    yield "\n".join(
        f"{name}={value}" for name, value in sorted(os.environ.items())
        if name.startswith(("CUDA", "NVIDIA", "OMP", "NCCL", "PYTORCH", "TORCH", "SUPEROFFLOAD"))
    )  # fmt: skip
    for command in _COMMANDS:
        yield f"$ {' '.join(command)}\n{_output(command) or 'nothing'}"
    for pattern in _FILES:
        for path in sorted(glob.glob(pattern)):
            yield f"{path}:\n{_read(path)}"


def packages() -> dict[str, str]:
    """Returns versions of the relevant packages that are installed."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _output(command: tuple[str, ...]) -> str:
    if shutil.which(command[0]) is None:
        return ""
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, errors="replace")
    except (OSError, subprocess.SubprocessError) as error:
        return f"{type(error).__name__}: {error}"
    return shown.stdout if shown.returncode == 0 else f"{shown.stdout}{shown.stderr}(exit status {shown.returncode})"


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError as error:
        return str(error)
