"""Compiles the kernels of csrc/cuda for one architecture by NVRTC, on the user's machine, and keeps them on disk."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from superoffload.errors import ArgumentError, KernelsUnavailable, warn

# ---- NVRTC, NVIDIA's compiler as a library, called by ctypes --------------------------------------------------------
# It needs neither a driver nor a GPU.

_FILE = re.compile(r"libnvrtc(?:-[0-9a-f]+)?\.so\.(\d+)[.\d]*")  # of wheels, of torch/lib, of a toolkit
_MAJORS = ("13", "12")  # the loader is asked for these


class CompileError(Exception):
    """Carries the compiler's log."""


@dataclass(frozen=True)
class Program:
    """Holds a source and the files that it includes, by their names in #include."""

    name: str
    source: str
    headers: Mapping[str, str]


class Nvrtc:
    """Wraps one NVRTC library. OSError: it cannot be loaded."""

    def __init__(self, name: str) -> None:
        self.name = name
        if Path(name).is_absolute():
            # NVRTC of some wheels (13.0.88) does not look for its built-in functions in its own folder.
            for builtins in sorted(Path(name).parent.glob("libnvrtc-builtins.so.*")):
                ctypes.CDLL(str(builtins))
        self._library = ctypes.CDLL(name)

    def _call(self, function: str, *arguments: Any) -> None:
        try:
            status = getattr(self._library, function)(*arguments)
        except AttributeError:
            raise CompileError(f"has no {function}: too old") from None
        if status != 0:
            raise CompileError(f"{function} returned {status}")

    @property
    def described(self) -> str:
        return f"NVRTC {'.'.join(map(str, self.version()))} ({self.name})"

    def version(self) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def architectures(self) -> list[int]:
        """Lists the architectures that it compiles for: 90 for sm_90."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        values = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", values)
        return list(values)

    def compile(self, program: Program, options: Sequence[str]) -> bytes:
        """Returns a cubin, or raises CompileError."""
        handle = ctypes.c_void_p()
        headers = _strings(program.headers.values())
        names = _strings(program.headers)
        source = program.source.encode()
        count = len(program.headers)
        self._call("nvrtcCreateProgram", ctypes.byref(handle), source, program.name.encode(), count, headers, names)
        try:
            if self._library.nvrtcCompileProgram(handle, len(options), _strings(options)) != 0:
                raise CompileError(self._bytes(handle, "nvrtcGetProgramLog").rstrip(b"\0").decode(errors="replace"))
            return self._bytes(handle, "nvrtcGetCUBIN")
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(handle))

    def _bytes(self, handle: ctypes.c_void_p, function: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"{function}Size", handle, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(function, handle, buffer)
        return buffer.raw


def _strings(values: Iterable[str]) -> Any:
    encoded = [value.encode() for value in values]
    return (ctypes.c_char_p * len(encoded))(*encoded)


def folders() -> list[Path]:
    """Lists where NVRTC may be: NVIDIA's wheels, which torch's CUDA wheels bring; torch's folder; a CUDA toolkit."""
    nvidia = find_spec("nvidia")  # the namespace of NVIDIA's wheels
    roots = [Path(root) for root in (nvidia.submodule_search_locations or () if nvidia is not None else ())]
    wheels = [folder for root in roots for folder in (root / "cuda_nvrtc" / "lib", *sorted(root.glob("cu[0-9]*/lib")))]
    toolkit = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda")
    return [*wheels, Path(torch.__file__).parent / "lib", toolkit / "lib64"]


def find_compilers(refusals: list[str]) -> Iterator[Nvrtc]:
    """Yields every NVRTC found; adds failed attempts to ``refusals``.

    The one of torch's CUDA version comes first, since code of a newer toolkit may be too new for the driver.
    """
    searched = folders()
    found = {path.resolve(): match[1] for folder in searched for path, match in _libraries(folder)}
    if not found:
        refusals.append(f"no libnvrtc.so in {', '.join(map(str, searched))}")
    major = str(torch.version.cuda).partition(".")[0]
    by_the_loader = (f"libnvrtc.so.{number}" for number in _MAJORS if number not in found.values())
    for name in [*sorted(found, key=lambda path: found[path] != major), *by_the_loader]:
        try:
            yield Nvrtc(str(name))
        except OSError as error:  # its text may not name the file
            refusals.append(f"{name}: {error}")


def _libraries(folder: Path) -> Iterator[tuple[Path, re.Match[str]]]:
    for path in sorted(folder.glob("libnvrtc*.so.*")):
        match = _FILE.fullmatch(path.name)
        if match is not None:
            yield path, match


# ---- our kernels ----------------------------------------------------------------------------------------------------

MAIN = "kernels.cu"
_ELF = b"\x7fELF"
_INSTALL = (
    "torch's CUDA wheels bring NVRTC; otherwise install superoffload[cuda12] or superoffload[cuda13], as the driver's "
    "version says, or a CUDA toolkit"
)


def source_folder() -> Path:
    """Finds the folder of the sources: inside an installed package, or in the repository."""
    here = Path(__file__).resolve().parent
    for folder in (here / "sources", here.parents[2] / "csrc" / "cuda"):
        if (folder / MAIN).is_file():
            return folder
    raise KernelsUnavailable(
        f"the kernels' sources are missing: no {MAIN} in {here / 'sources'}; reinstall the package"
    )


def load_program() -> tuple[Program, list[str]]:
    """Reads the sources and the options that their results depend on."""
    folder = source_folder()
    headers = {path.name: path.read_text() for path in sorted(folder.glob("*.cuh"))}
    options = (folder / "options.txt").read_text().split()
    return Program(MAIN, (folder / MAIN).read_text(), headers), options


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Returns the path $XDG_CACHE_HOME/superoffload/kernels."""
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base and os.path.isabs(base) else Path.home() / ".cache") / "superoffload" / "kernels"


def compile_kernels(arch: str, *, cache: Path | None = None) -> bytes:
    """Returns a cubin of all kernels for ``arch`` ("sm_90"), from the cache if it is there.

    If NVRTC does not know the architecture, it compiles for the closest one before it with the same first digits, whose
    code runs there too. KernelsUnavailable says what to install.
    """
    if not re.fullmatch(r"sm_\d+[af]?", arch):
        raise ArgumentError(f"arch={arch!r}: expected an architecture such as 'sm_90'")
    program, options = load_program()
    refusals: list[str] = []
    for compiler in find_compilers(refusals):
        try:
            target = closest(compiler, arch)
            return _cached(compiler, program, [*options, f"--gpu-architecture={target}"], target, cache)
        except CompileError as error:
            refusals.append(f"{compiler.name}: {error}")
    raise KernelsUnavailable(f"no kernels for {arch}: {_INSTALL}. Tried: " + "; ".join(refusals))


def closest(compiler: Nvrtc, arch: str) -> str:
    """Returns the closest known architecture whose code runs on ``arch``; CompileError if there is none."""
    number = int(re.sub(r"\D", "", arch))
    known = compiler.architectures()
    if number in known:
        return arch
    fitting = [other for other in known if other // 10 == number // 10 and other < number]
    if not fitting:
        listed = ", ".join(f"sm_{other}" for other in known)
        raise CompileError(f"it compiles for {listed}")
    return f"sm_{max(fitting)}"


def _cached(compiler: Nvrtc, program: Program, options: Sequence[str], target: str, cache: Path | None) -> bytes:
    folder = cache if cache is not None else cache_folder()
    path = folder / f"{target}-{_key(compiler, program, options)}.cubin"
    try:
        found = path.read_bytes()
    except OSError:
        found = b""
    if _is_whole(found):
        return found[: -hashlib.sha256().digest_size]
    cubin = compiler.compile(program, options)
    try:
        _write(path, cubin + hashlib.sha256(cubin).digest())
    except OSError as error:
        warn(
            f"kernels are compiled anew by every process: they cannot be kept in {folder} ({error}); "
            "XDG_CACHE_HOME names another place"
        )
    return cubin


def _key(compiler: Nvrtc, program: Program, options: Sequence[str]) -> str:
    parts = [program.source, *(part for header in program.headers.items() for part in header), *options]
    parts.append(repr(compiler.version()))
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part.encode())
    return digest.hexdigest()[:32]


def _is_whole(found: bytes) -> bool:
    size = hashlib.sha256().digest_size
    return found.startswith(_ELF) and hashlib.sha256(found[:-size]).digest() == found[-size:]


def _write(path: Path, contents: bytes) -> None:
    """Writes the file wholly or not at all, also while other processes write it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(contents)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
