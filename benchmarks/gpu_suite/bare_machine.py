"""Makes a bare machine ready: says what it is, installs the wheels, provides the package's extension. Needs no torch.

An extension's name tells its sources and the machine that it is for: _native-0123456789abcdef-x86_64.abi3.so.
"""

from __future__ import annotations

import glob
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.report import ROOT, digest_of, installed

CARRIED = ROOT / "build" / "gpu"  # brought to a bare machine: extension, results so far, wheels
BUILD_SECONDS, _WHEEL_SECONDS = 420.0, 120.0
_IMPORT = "import superoffload._native as native; print(native.__file__)"
_COMMANDS = (
    "nvidia-smi", "nvidia-smi topo -m", "nvidia-smi --query-gpu=pcie.link.gen.max,pcie.link.width.max --format=csv",
    "nvcc --version", "compute-sanitizer --version", "lscpu", "numactl --hardware", "free -m", "df -h /tmp /dev/shm",
)  # fmt: skip
_FILES = (
    "/sys/kernel/mm/transparent_hugepage/enabled",
    "/sys/devices/system/node/node*/meminfo",
    "/sys/fs/cgroup/[mc]*.max",
)
PACKAGES = (
    "torch", "numpy", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-runtime", "nvidia-nccl-cu13",
    "setuptools", "cython", "ninja", "pytest", "pytest-timeout", "pytest-xdist", "hypothesis",
    "deepspeed", "torchao", "transformers", "matplotlib",
)  # fmt: skip


class BuildError(Exception):
    """Reports a failed build; the log has the compiler's output."""


def prepare(out: Path, log: Path, wheels: Path | None, *, builds: bool) -> str | None:
    """Describes the machine in the log, installs wheels, makes the extension importable.

    Returns why nothing can be measured, or None.
    """
    with log.open("a", encoding="utf-8") as file:
        file.write(f"\n===== {' '.join(sys.argv)}, {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
        file.write(f"{platform.platform()}, Python {sys.version}, {sys.executable}\n{installed(*PACKAGES)}\n")
        file.writelines(f"$ {command}\n{_output(command)}\n" for command in _COMMANDS)
        for path in (path for pattern in _FILES for path in sorted(glob.glob(pattern))):
            file.write(f"{path}:\n{Path(path).read_text(errors='replace')}\n")
    gpu = _output("nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader").strip()
    print(f"GPU: {gpu or 'nvidia-smi finds none'}; {len(os.sched_getaffinity(0))} processors; ", end="")
    print(f"Python {platform.python_version()}, {installed('torch')}", flush=True)
    threads = os.environ.pop("OMP_NUM_THREADS", None)
    if threads is not None:  # set by an image, for example; it would bound our worker threads
        print(f"OMP_NUM_THREADS={threads} is in the environment; the measurements go without it", flush=True)
    if wheels is not None:
        _install_wheels(wheels, log)
    if not builds:
        return None
    try:
        print(provide(log, keep_in=out), flush=True)
    except (BuildError, OSError, subprocess.SubprocessError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _output(command: str) -> str:
    try:
        shown = subprocess.run(command.split(), capture_output=True, text=True, timeout=20, errors="replace")
    except (OSError, subprocess.SubprocessError):
        return ""
    return shown.stdout


def _install_wheels(wheels: Path, log: Path) -> None:
    """Installs wheels for this process and its jobs, each alone: a broken one costs its own contestant only."""
    site = Path(tempfile.gettempdir()) / "superoffload-suite-site"
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    options = ["-q", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade", "--target", str(site)]
    failed = []
    with log.open("ab") as file:
        for wheel in sorted(wheels.glob("*.whl")):
            command = [sys.executable, "-m", "pip", "install", *options, str(wheel)]
            try:
                subprocess.run(command, stdout=file, stderr=file, timeout=_WHEEL_SECONDS, check=True)
            except subprocess.SubprocessError:
                failed.append(wheel.name)
    sys.path.insert(0, str(site))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    print(f"wheels installed; all but: {', '.join(failed)}" if failed else "wheels installed", flush=True)


# ---- the extension ---------------------------------------------------------------------------------------------------


def prebuilt_name() -> str:
    return f"_native-{digest_of(('csrc', 'setup.py'))}-{platform.machine()}.abi3.so"


def _in_package() -> Path:
    return ROOT / "superoffload" / "_native.abi3.so"


def provide(log: Path, keep_in: Path) -> str:
    """Puts an extension into the package that this Python imports; returns what it did, or raises BuildError.

    ``keep_in``: folder for a stripped copy of one that is built here, for the next machine.
    """
    ready = CARRIED / prebuilt_name()
    if ready.is_file():
        new = _in_package().with_suffix(".new")
        shutil.copy(ready, new)
        os.replace(new, _in_package())  # replaced, not overwritten: a process may be running the old one
        error = import_error()
        if error is None:
            return f"the extension was built before: {ready.name}"
        _in_package().unlink()  # made for another processor or C library
        said = f"{ready.name} cannot be imported here ({error}); "
    else:
        said = f"no {ready.name} in {CARRIED}; "
    build(log)
    error = import_error()
    if error is not None:
        raise BuildError(f"the extension was built and cannot be imported: {error}")
    copy_stripped(keep_in)
    return f"{said}the extension was built here"


def build(log: Path) -> None:
    """Builds what is not up to date; appends the compiler's output to ``log``."""
    environment = {**os.environ, "SUPEROFFLOAD_BUILD_DIR": str(ROOT / "build" / "native")}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    with log.open("ab") as file:
        try:
            subprocess.run(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                timeout=BUILD_SECONDS, check=True,
            )  # fmt: skip
        except subprocess.SubprocessError as error:
            raise BuildError(f"{error}:\n{log.read_text(errors='replace')[-1500:]}") from None


def import_error() -> str | None:
    """Returns why the package's extension cannot be imported; tries in a process, which an illegal instruction ends."""
    shown = subprocess.run(
        [sys.executable, "-c", _IMPORT], cwd=ROOT, capture_output=True, text=True, timeout=60, errors="replace"
    )
    if shown.returncode == 0 and Path(shown.stdout.strip()).parent == ROOT / "superoffload":
        return None
    return (shown.stderr.strip().splitlines() or [shown.stdout.strip() or f"exit status {shown.returncode}"])[-1]


def copy_stripped(folder: Path) -> Path:
    """Copies the package's extension to a name that tells its sources and the machine."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / prebuilt_name()
    shutil.copy(_in_package(), target)
    if shutil.which("strip"):
        subprocess.run(["strip", "--strip-unneeded", str(target)], check=False, timeout=60)
    return target
