"""Builds what a release uploads, in dist/: the sources, and a wheel each for x86-64 and ARM, which it checks.

    python scripts/release.py                    # or: make wheels
    python scripts/release.py --version 0.3.0    # first sets the version and dates the changelog's unreleased section
    python -m twine upload dist/*                # nothing here uploads or commits

The wheels are built from the archive of the sources, so that one builds, too. Zig's clang compiles for both machines
with the C library of manylinux_2_28, as torch's wheels are; the extension is for Python's limited API, so that a wheel
serves every Python from 3.10 on. Needs requirements/release.txt.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MACHINES = ("x86_64", "aarch64")
GLIBC = "2.28"
LARGEST = 4 << 20  # bytes of a wheel
_BUILD = """
import sys
from setuptools import build_meta
print(build_meta.{what}(sys.argv[1], {{"--build-option": sys.argv[2:]}}))"""
_UNRELEASED = "## [Unreleased]\n"


class ReleaseError(Exception):
    """Something is not fit for a release; the text says what, and what to do."""


# ---- version and changelog -------------------------------------------------------------------------------------------


def set_version(version: str, root: Path = ROOT, today: datetime.date | None = None) -> None:
    """Writes the version, and gives it the changelog's unreleased section; changes nothing when it raises."""
    source, changelog = root / "superoffload" / "_version.py", root / "CHANGELOG.md"
    text, log = source.read_text(), changelog.read_text()
    (now,) = re.findall(r'(?m)^__version__ = "(.*)"$', text)
    if not re.fullmatch(r"\d+\.\d+\.\d+", version) or _numbers(version) <= _numbers(now):
        raise ReleaseError(f"--version {version}: expected three numbers, such as 1.2.3, higher than {now}")
    before, found, after = log.partition(_UNRELEASED)
    if not found or not after.partition("\n## ")[0].strip():
        raise ReleaseError(f"{changelog.name} has nothing under {_UNRELEASED.strip()}: write what changed for users")
    date = (today or datetime.date.today()).isoformat()
    changelog.write_text(f"{before}{_UNRELEASED}\n## [{version}] - {date}\n{after}")
    source.write_text(text.replace(f'"{now}"', f'"{version}"'))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


# ---- build -----------------------------------------------------------------------------------------------------------


def build_sources(out: Path) -> Path:
    return out / _built("build_sdist", ROOT, out, {})


def build_wheel(sources: Path, machine: str, out: Path) -> Path:
    """Cross-compiles the wheel of ``machine`` from the archive of the sources."""
    target = f"{machine}-linux-gnu.{GLIBC}"
    zig = f"{sys.executable} -m ziglang"
    settings = {"CC": f"{zig} cc -target {target}", "CXX": f"{zig} c++ -target {target}", "LDFLAGS": "-s"}
    settings |= {"SUPEROFFLOAD_TARGET": machine, "CFLAGS": "-g0"}
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(sources) as archive:
            archive.extractall(folder, filter="data")
        (tree,) = Path(folder).iterdir()
        platform = f"manylinux_{GLIBC.replace('.', '_')}_{machine}"
        return out / _built("build_wheel", tree, out, settings, f"--plat-name={platform}")


def _built(what: str, tree: Path, out: Path, settings: dict[str, str], *options: str) -> str:
    """Returns the name of the file that setuptools made."""
    command = [sys.executable, "-c", _BUILD.format(what=what), str(out), *options]
    shown = subprocess.run(command, cwd=tree, env={**os.environ, **settings}, capture_output=True, text=True)
    if shown.returncode != 0:
        raise ReleaseError(f"{what} failed:\n{shown.stdout[-1000:]}\n{shown.stderr[-3000:]}")
    return shown.stdout.strip().splitlines()[-1]


# ---- checks ----------------------------------------------------------------------------------------------------------


def check_wheel(wheel: Path) -> str:
    """Returns what auditwheel found: the oldest platform that the wheel is for."""
    machine = wheel.stem.rpartition("-")[2].partition(f"{GLIBC.replace('.', '_')}_")[2]
    if wheel.stat().st_size > LARGEST:
        raise ReleaseError(f"{wheel.name}: {wheel.stat().st_size:,} bytes, at most {LARGEST:,}")
    if "-cp310-abi3-" not in wheel.name:
        raise ReleaseError(f"{wheel.name}: expected a name with cp310-abi3, for Python's limited API")
    names = zipfile.ZipFile(wheel).namelist()
    needed = ("superoffload/_native.abi3.so", "superoffload/py.typed", "superoffload/links/cuda/sources/kernels.cu")
    missing = [name for name in needed if name not in names]
    others = [name for name in names if not name.startswith(("superoffload/", "superoffload-"))]
    if missing or others:
        raise ReleaseError(f"{wheel.name}: lacks {missing}, and should not have {others}")
    command = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    shown = " ".join(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    found = re.search(rf'following platform tag: "manylinux_(\d+)_(\d+)_{machine}"', shown)
    if found is None or (int(found[1]), int(found[2])) > _numbers(GLIBC):
        raise ReleaseError(f"{wheel.name} is not what its name says. auditwheel: {shown}")
    return f"manylinux_{found[1]}_{found[2]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", help="set this version first")
    parser.add_argument("--machine", nargs="+", choices=MACHINES, default=MACHINES, help="default: all")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="default: dist")
    chosen = parser.parse_args()
    try:
        if chosen.version:
            set_version(chosen.version)
        out = chosen.out.resolve()
        out.mkdir(parents=True, exist_ok=True)
        sources = build_sources(out)
        print(f"{sources.name}: {sources.stat().st_size / 1e6:.2f} MB", flush=True)
        for machine in chosen.machine:
            wheel = build_wheel(sources, machine, out)
            print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB, {check_wheel(wheel)}", flush=True)
    except ReleaseError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
