"""Builds `superoffload._native`; pyproject.toml has everything else about the package.

The extension is C++17 and Cython on raw pointers: no torch, no CUDA. Each instruction set is one source file with
flags of its own (csrc/flags.txt), chosen at run time, so one build runs on every CPU of its architecture. It is built
for Python's limited API (PEP 384), so one build also serves every Python from 3.10 on.

Environment variables, all optional:
  CXX                       the compiler (also for cross-building, together with the target's Python headers)
  SUPEROFFLOAD_TARGET       the machine to build for, when it is not this Python's: x86_64, aarch64, ...
  SUPEROFFLOAD_BUILD_ISAS   comma-separated instruction sets to build, where a compiler lacks one; must include scalar
  SUPEROFFLOAD_BUILD_DIR    keep object files there and recompile only what changed; the file `objects` lists them
  SUPEROFFLOAD_DEBUG=1      debug information where CFLAGS or Python ask for it; a far larger extension, built slower
  SUPEROFFLOAD_WERROR=1     warnings are errors (for our own builds; a newer compiler must not break an install)
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import BaseError, CCompilerError, CompileError, OptionError

ROOT = Path(__file__).resolve().parent
MODULE = "superoffload._native"
BINDINGS, DECLARATIONS = "csrc/_native.pyx", "csrc/_native.pxd"
OLDEST_PYTHON = (3, 10)
KERNEL_SOURCES = ("*.cu", "*.cuh", "options.txt")  # in csrc/cuda
FAILURES = (BaseError, CCompilerError, OSError)  # raised by a failed compiler; setuptools' errors share no base


@dataclass(frozen=True)
class Plan:
    """Lists what is compiled for one target machine: sources relative to the repository, each with all of its flags."""

    sources: dict[str, list[str]]
    isas: list[str]


def target_machine(environment: Mapping[str, str] = os.environ) -> str:
    """Returns the machine of the Python that will import the extension, not of the one that compiles it."""
    named = environment.get("SUPEROFFLOAD_TARGET")
    machine = (named or sysconfig.get_platform().rsplit("-", 1)[-1]).lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)


def read_flags() -> tuple[dict[str, list[str]], dict[str, tuple[str, list[str]]]]:
    """Returns csrc/flags.txt as ({"common", "strict" or "bindings": flags}, {instruction set: (machine, flags)})."""
    flags: dict[str, list[str]] = {"common": [], "strict": [], "bindings": []}
    isas: dict[str, tuple[str, list[str]]] = {}
    for line in (ROOT / "csrc" / "flags.txt").read_text().splitlines():
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        if words[0] == "isa":
            isas[words[1]] = (words[2], words[3:])
        else:
            flags[words[0]].extend(words[1:])
    return flags, isas


def chosen_isas(known: dict[str, tuple[str, list[str]]], machine: str, environment: Mapping[str, str]) -> list[str]:
    """Returns the instruction sets to build for `machine`: all that it can have, or those the user named."""
    possible = [name for name, (only_on, _) in known.items() if only_on in ("any", machine)]
    named = environment.get("SUPEROFFLOAD_BUILD_ISAS")
    if not named:
        return possible
    wanted = [name.strip() for name in named.split(",") if name.strip()]
    if "scalar" not in wanted or not set(wanted) <= set(possible):
        raise OptionError(
            f"SUPEROFFLOAD_BUILD_ISAS={named!r}: expected a comma-separated list with scalar in it, "
            f"out of {', '.join(possible)} for {machine}. Correct the list or unset the variable."
        )
    return [name for name in possible if name in wanted]


def plan(machine: str, environment: Mapping[str, str] = os.environ) -> Plan:
    """Returns every source of the extension for `machine` with its flags; omits sets of other machines."""
    flags, known = read_flags()
    common = flags["common"]
    if environment.get("SUPEROFFLOAD_WERROR") == "1":
        common = common + flags["strict"]
    if environment.get("SUPEROFFLOAD_DEBUG") != "1":
        common = [*common, "-g0"]  # after Python's own flags, which often have -g
    isas = chosen_isas(known, machine, environment)
    common = common + [f"-DSUPEROFFLOAD_BUILT_{name.upper()}=1" for name in isas]
    limited = f"-DPy_LIMITED_API=0x{OLDEST_PYTHON[0]:02x}{OLDEST_PYTHON[1]:02x}0000"
    sources = {BINDINGS: [*common, *flags["bindings"], limited]}
    folders = ("arm_adam", "cuda", "runtime")
    for path in (path for name in folders for path in sorted(ROOT.glob(f"csrc/{name}/*.cpp"))):
        isa = path.stem.removeprefix("isa_") if path.stem.startswith("isa_") else None
        if isa is None or isa in isas:
            sources[path.relative_to(ROOT).as_posix()] = common + (known[isa][1] if isa else [])
    return Plan(sources, isas)


class BuildNative(build_ext):
    """Compiles every source with its own flags, in parallel, and says plainly what is missing."""

    def build_extension(self, ext: Extension) -> None:
        self.check_toolchain()
        machine = target_machine()
        what = plan(machine)
        print(f"superoffload: building for {machine} with {', '.join(what.isas)}", flush=True)
        folders = [str(ROOT / "csrc")]
        with ThreadPoolExecutor(self.parallel or os.cpu_count() or 1) as pool:
            jobs = [pool.submit(self.compile_one, source, flags, folders) for source, flags in what.sources.items()]
            objects = [job.result() for job in jobs]
        kept = os.environ.get("SUPEROFFLOAD_BUILD_DIR")
        if kept:  # for csrc/tests/Makefile
            Path(kept, "objects").write_text("".join(f"{os.path.abspath(path)}\n" for path in objects))
        output = self.get_ext_fullpath(ext.name)
        for older in Path(output).parent.glob("_native.cpython-*.so"):
            older.unlink()  # of a version that was built for one Python, which would find that first
        dl = ["-ldl"] if sys.platform == "linux" else []  # a separate library before glibc 2.34
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(objects, output, extra_postargs=["-pthread", *dl], target_lang="c++")

    def check_toolchain(self) -> None:
        """Fails early and in plain words; a missing compiler otherwise shows as a trace of the build tools."""
        if self.compiler.compiler_type != "unix":
            raise CCompilerError(
                f"superoffload cannot be built with compiler type {self.compiler.compiler_type!r}: "
                "it needs g++ or clang++ on a POSIX system."
            )
        places = [*self.compiler.include_dirs, *self.include_dirs, sysconfig.get_path("include")]
        if not any(Path(place, "Python.h").is_file() for place in places):
            raise CCompilerError(
                f"superoffload needs the Python headers to build, and there is no Python.h in {', '.join(places)}. "
                "Install them (Debian, Ubuntu: apt install python3-dev; Fedora: dnf install python3-devel)."
            )
        with tempfile.TemporaryDirectory() as folder:
            probe = Path(folder, "probe.cpp")
            probe.write_text("#include <type_traits>\nint main() { return std::is_same_v<int, long>; }\n")
            try:
                self.compiler.compile([str(probe)], output_dir=folder, extra_postargs=["-std=c++17"])
            except FAILURES as error:
                command = getattr(self.compiler, "compiler_so_cxx", None) or self.compiler.compiler_so
                raise CCompilerError(
                    f"superoffload needs a C++17 compiler to build, and {shlex.join(command)} cannot compile "
                    f"an empty program ({error}). Install one (Debian, Ubuntu: apt install g++; Fedora: "
                    "dnf install gcc-c++; macOS: xcode-select --install), or name yours in the CXX variable."
                ) from error

    def compile_one(self, source: str, flags: list[str], folders: list[str]) -> str:
        """Compiles `source` unless its object file is newer than all its inputs; returns the object."""
        # The folder's name includes the flags, so an object made with other flags is never taken for this one.
        mark = hashlib.sha256(
            repr((flags, folders, vars(self.compiler).get("compiler_so_cxx"), self.compiler.compiler_so)).encode()
        ).hexdigest()[:12]
        folder = Path(os.environ.get("SUPEROFFLOAD_BUILD_DIR") or self.build_temp) / f"{target_machine()}-{mark}"
        target = folder / Path(source).with_suffix(".o")
        depends = target.with_suffix(".d")
        if is_current(target, depends, source):
            return str(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        compiled = source
        if source == BINDINGS:  # a path from here, since setuptools puts the object of any other elsewhere
            compiled = os.path.relpath(translate(source, target.with_suffix(".cpp")))
        extra = [*flags, "-MMD", "-MF", str(depends)]
        output = os.path.relpath(folder) if compiled == source else ""
        try:
            self.compiler.compile([compiled], output_dir=output, include_dirs=folders, extra_postargs=extra)
        except FAILURES as error:
            raise CompileError(
                f"{source} did not compile ({error}); the compiler's own words are above. superoffload is built with "
                "g++ >= 11 and clang++ >= 14. Where an older one lacks an instruction set, leave that set out: "
                "SUPEROFFLOAD_BUILD_ISAS=scalar,... (a comma-separated list)."
            ) from error
        return str(target)


def translate(source: str, target: Path) -> Path:
    """Has Cython translate `source` to C++, and returns `target`."""
    command = [sys.executable, "-m", "cython", "--cplus", "-3", source, "-o", str(target)]
    if subprocess.run(command).returncode != 0:
        raise CompileError(
            f"{shlex.join(command)} failed; its own words are above. The extension is built with Cython >= 3.1: "
            f"{sys.executable} -m pip install 'cython>=3.1'"
        )
    return target


class BuildPython(build_py):
    """Puts the sources of the accelerator's kernels into the package: they are compiled where they run.

    An editable installation finds them in csrc/cuda.
    """

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib, "superoffload", "links", "cuda", "sources")
        target.mkdir(parents=True, exist_ok=True)
        for pattern in KERNEL_SOURCES:
            for path in sorted((ROOT / "csrc" / "cuda").glob(pattern)):
                shutil.copy(path, target)


def is_current(target: Path, depends: Path, source: str) -> bool:
    """Returns whether `target` is newer than every file that was read to make it."""
    if not (target.is_file() and depends.is_file()):
        return False
    made = target.stat().st_mtime_ns
    rule = depends.read_text().replace("\\\n", " ")  # "target: file file ...", spaces in names escaped
    read = [source, *shlex.split(rule.split(": ", 1)[-1])]
    if source == BINDINGS:
        read.append(DECLARATIONS)
    return all(Path(path).is_file() and Path(path).stat().st_mtime_ns < made for path in read)


def main() -> None:
    os.chdir(ROOT)  # sources are named relative to it
    sources = sorted(plan(target_machine(), {}).sources)
    setup(
        ext_modules=[Extension(MODULE, sources, language="c++", py_limited_api=True)],
        cmdclass={"build_ext": BuildNative, "build_py": BuildPython},
        options={"bdist_wheel": {"py_limited_api": "cp{}{}".format(*OLDEST_PYTHON)}},
    )


if __name__ == "__main__":
    main()
