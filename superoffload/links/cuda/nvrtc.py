"""Calls NVRTC, NVIDIA's compiler as a library, by ctypes. It needs neither a driver nor a GPU."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

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


def find(refusals: list[str]) -> Iterator[Nvrtc]:
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
