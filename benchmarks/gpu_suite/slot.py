"""Prepares what travels to a bare machine with a GPU, and prints the commands: `make slot`.

    .venv/bin/python -m benchmarks.gpu_suite.slot [FOLDER]

It builds the extension, fetches the wheels of the peers for the Python there, and takes the published results along.
What is there already is left alone, so that the command may be given before every slot.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu_suite.bare_machine import CARRIED, BuildError, build, copy_stripped, prebuilt_name
from benchmarks.report import ROOT

LIMIT = 64 << 20  # bytes of build/gpu; machines that are lent take no more
_DEEPSPEED = ["deepspeed==0.19.8", "hjson==3.1.0"]  # made here, of any Python
_RUN = "benchmarks/gpu_suite/run.sh OUT"


def _platforms(*names: str) -> list[str]:
    return [word for name in names for word in ("--platform", f"{name}_{platform.machine()}")]


_OF_MANYLINUX = ["pydantic==2.14.3", "pydantic-core==2.50.4", "msgpack==1.2.4", "annotated-types", "typing-inspection"]
FETCHED: dict[tuple[str, ...], list[str]] = {  # pip's words, and what it gets with them
    ("wheel", "--no-build-isolation"): _DEEPSPEED,
    ("download", "--only-binary=:all:", *_platforms("manylinux2014")): _OF_MANYLINUX,
    ("download", "--only-binary=:all:", *_platforms("manylinux_2_28")): ["torchao==0.18.0"],
}


def prepare(folder: Path, python: str) -> list[str]:
    """Fills ``folder`` for a machine with that version of Python. Returns what is missing."""
    missing = []
    built = folder / prebuilt_name()
    if not built.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("_native-*.so"):
            old.unlink()
        try:
            build(folder / "build.log")
            copy_stripped(folder)
        except BuildError as error:
            missing.append(f"the extension: {error}")
    for words, names in FETCHED.items():
        for name in names:
            if not _has_wheel(folder / "wheels", name):
                reason = _fetch(folder / "wheels", words, name, python)
                if reason:
                    missing.append(f"the wheel of {name}: {reason}")
    results = folder / "gpu_suite.json"
    published = sorted((ROOT / "benchmarks" / "results").glob("gpu-*[0-9].json"))
    if not results.is_file() and published:
        shutil.copy(published[-1], results)
    return missing


def _has_wheel(wheels: Path, name: str) -> bool:
    project, _, version = name.partition("==")
    return any(wheels.glob(f"{project.replace('-', '_')}-{version or '*'}-*.whl"))


def _fetch(wheels: Path, words: tuple[str, ...], name: str, python: str) -> str:
    """Returns why a wheel could not be had; empty: it is there."""
    kind = ["-w", str(wheels)] if words[0] == "wheel" else ["-d", str(wheels), "--python-version", python]
    command = [
        sys.executable,
        "-m",
        "pip",
        words[0],
        "-q",
        "--no-deps",
        "--disable-pip-version-check",
        *words[1:],
        *kind,
        name,
    ]
    environment = {**os.environ, "DS_BUILD_OPS": "0"}
    shown = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600)
    return "" if shown.returncode == 0 else shown.stderr.strip().rpartition("\n")[2] or f"exit {shown.returncode}"


def _shown(folder: Path) -> Path:
    return folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=CARRIED, help="default: %(default)s")
    parser.add_argument("--python", default="3.12", help="the version of the machine's Python (default: %(default)s)")
    chosen = parser.parse_args()
    missing = prepare(chosen.folder, chosen.python)
    files = sorted(file for file in chosen.folder.rglob("*") if file.is_file())
    size = sum(file.stat().st_size for file in files)
    print(
        f"{_shown(chosen.folder)}: {size / 1e6:.1f} MB for Python {chosen.python}; at most {LIMIT / 1e6:.1f} MB travel"
    )
    for file in files:
        print(f"  {file.stat().st_size / 1e6:6.2f} MB  {file.relative_to(chosen.folder)}")
    if size > LIMIT:
        missing.append(f"{(size - LIMIT) / 1e6:.1f} MB too much: remove what is not needed")
    print("\n  ".join(["missing:", *missing]) if missing else "nothing is missing. On the machine:")
    for slot in ("", " --slot second", " --slot third"):
        print(f"  {_RUN}{slot}\n  cp OUT/* {_shown(chosen.folder)}/    # at once, and before the next call")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
