"""Provides the package's extension on a bare machine: a prebuilt one, or one that it builds there.

    python -m benchmarks.extension [FOLDER]      # builds it for this Python into FOLDER (default: build/gpu)

A file's name tells which Python and which sources it is for: _native-0123456789abcdef.cpython-312-x86_64-linux-gnu.so.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from benchmarks.commands import CARRIED
from benchmarks.sources import digest_of

ROOT = Path(__file__).resolve().parents[1]
PREBUILT = CARRIED
BUILD_SECONDS = 420.0
_SOURCES = ("csrc", "setup.py")
_IMPORT = "import superoffload._native as native; print(native.__file__)"


def prebuilt_name() -> str:
    return f"_native-{digest_of(_SOURCES)}{_suffix()}"


def provide(log: Path, keep_in: Path | None = None, prebuilt: Path = PREBUILT) -> str:
    """Puts an extension into the package that this Python imports; returns what it did, or raises BuildError.

    ``keep_in``: folder for a stripped copy, for the next machine.
    """
    ready = prebuilt / prebuilt_name()
    if ready.is_file():
        _install(ready)
        error = import_error()
        if error is None:
            return f"the extension was built before: {ready.name}"
        _installed().unlink()  # made for another processor or C library
        said = f"{ready.name} cannot be imported here ({error}); "
    else:
        said = f"no {ready.name} in {prebuilt}; "
    build(log, BUILD_SECONDS)
    error = import_error()
    if error is not None:
        raise BuildError(f"the extension was built and cannot be imported: {error}")
    if keep_in is not None:
        copy_stripped(keep_in)
    return f"{said}the extension was built here"


class BuildError(Exception):
    """Reports a failed build; the log has the compiler's output."""


def build(log: Path, seconds: float | None = None) -> None:
    """Builds what is not up to date, within ``seconds``; appends the compiler's output to ``log``."""
    environment = {**os.environ, "SUPEROFFLOAD_BUILD_DIR": str(ROOT / "build" / "native")}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    with log.open("ab") as file:
        file.write(b"\n===== building the extension\n")
        file.flush()
        try:
            status = subprocess.run(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                timeout=seconds,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            raise BuildError(f"the extension was not built within {seconds:g} s") from None
    if status:
        raise BuildError(f"setup.py build_ext ended with {status}:\n{_end_of(log)}")


def import_error() -> str | None:
    """Returns why the package's extension cannot be imported; tries in a process, which an illegal instruction ends."""
    shown = subprocess.run(
        [sys.executable, "-c", _IMPORT], cwd=ROOT, capture_output=True, text=True, timeout=60, errors="replace"
    )
    if shown.returncode == 0 and Path(shown.stdout.strip()).parent == ROOT / "superoffload":
        return None
    lines = shown.stderr.strip().splitlines() or [shown.stdout.strip() or f"exit status {shown.returncode}"]
    return lines[-1]


def copy_stripped(folder: Path) -> Path:
    """Copies the package's extension to a name that tells its Python and sources."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / prebuilt_name()
    shutil.copy(_installed(), target)
    if shutil.which("strip"):
        subprocess.run(["strip", "--strip-unneeded", str(target)], check=False, timeout=60)
    return target


def _install(built: Path) -> None:
    new = _installed().with_suffix(".new")
    shutil.copy(built, new)
    os.replace(new, _installed())  # replaced, not overwritten: a process may be running the old one


def _installed() -> Path:
    return ROOT / "superoffload" / f"_native{_suffix()}"


def _suffix() -> str:
    return str(sysconfig.get_config_var("EXT_SUFFIX"))


def _end_of(log: Path, characters: int = 1500) -> str:
    return log.read_text(errors="replace")[-characters:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=PREBUILT, help="default: %(default)s")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    try:
        build(folder / "build.log")
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    print(copy_stripped(folder))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
