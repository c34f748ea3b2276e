"""NVRTC, NVIDIA's compiler as a library, by whichever way this Python has it. None of them needs a driver or a GPU."""

from __future__ import annotations

import ctypes
import importlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


class CompileError(Exception):
    """The compiler's log."""


@dataclass(frozen=True)
class Program:
    """A source and the files that it includes, by the names under which it does."""

    name: str
    source: str
    headers: Mapping[str, str]


class Nvrtc(Protocol):
    """One way to NVRTC."""

    name: str

    def version(self) -> tuple[int, int]: ...

    def architectures(self) -> list[int]:
        """That it compiles for: 90 for sm_90."""

    def compile(self, program: Program, options: Sequence[str]) -> bytes:
        """A cubin, or CompileError."""


class LibraryNvrtc:
    """The shared library itself. torch's own wheels bring the one that fits their CUDA version."""

    def __init__(self) -> None:
        path = self._find()
        self.name = str(path)
        self._library = ctypes.CDLL(self.name)

    @staticmethod
    def _find() -> Path:
        folders = []
        nvidia = importlib.import_module("nvidia")  # the namespace of NVIDIA's wheels
        for root in nvidia.__path__:
            folders += [*Path(root).glob("cuda_nvrtc/lib"), *sorted(Path(root).glob("cu*/lib"), reverse=True)]
        for folder in folders:
            for path in sorted(folder.glob("libnvrtc.so.*")):
                if re.fullmatch(r"libnvrtc\.so\.\d+", path.name):
                    return path
        raise FileNotFoundError("no libnvrtc.so in the wheels below nvidia/")

    def _call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._library, function)(*arguments)
        if status != 0:
            raise CompileError(f"{function} returned {status}")

    def version(self) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def architectures(self) -> list[int]:
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        values = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", values)
        return list(values)

    def compile(self, program: Program, options: Sequence[str]) -> bytes:
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


def _strings(values: Any) -> Any:
    encoded = [value.encode() for value in values]
    return (ctypes.c_char_p * len(encoded))(*encoded)


class BindingsNvrtc:
    """The package cuda-bindings, of CUDA 12 or 13."""

    name = "cuda-bindings"

    def __init__(self) -> None:
        self._nvrtc: Any = importlib.import_module("cuda.bindings.nvrtc")
        self.version()  # loads the library, or says that there is none

    def _call(self, function: str, *arguments: Any) -> Any:
        status, *results = getattr(self._nvrtc, function)(*arguments)
        if int(status) != 0:
            raise CompileError(f"{function}: {status}")
        return results[0] if len(results) == 1 else tuple(results)

    def version(self) -> tuple[int, int]:
        major, minor = self._call("nvrtcVersion")
        return int(major), int(minor)

    def architectures(self) -> list[int]:
        count = self._call("nvrtcGetNumSupportedArchs")
        values = self._call("nvrtcGetSupportedArchs")
        return [int(value) for value in values][: int(count)]

    def compile(self, program: Program, options: Sequence[str]) -> bytes:
        headers = [text.encode() for text in program.headers.values()]
        names = [name.encode() for name in program.headers]
        source = program.source.encode()
        handle = self._call("nvrtcCreateProgram", source, program.name.encode(), len(headers), headers, names)
        try:
            (status,) = self._nvrtc.nvrtcCompileProgram(handle, len(options), [option.encode() for option in options])
            if int(status) != 0:
                raise CompileError(self._bytes(handle, "nvrtcGetProgramLog").rstrip(b"\0").decode(errors="replace"))
            return self._bytes(handle, "nvrtcGetCUBIN")
        finally:
            self._nvrtc.nvrtcDestroyProgram(handle)

    def _bytes(self, handle: Any, function: str) -> bytes:
        buffer = b" " * int(self._call(f"{function}Size", handle))
        self._call(function, handle, buffer)
        return buffer


class CupyNvrtc:
    """CuPy's lowest level; cupy.RawModule needs a driver even to compile."""

    name = "CuPy"

    def __init__(self) -> None:
        self._nvrtc: Any = importlib.import_module("cupy.cuda.nvrtc")
        self.version()

    def version(self) -> tuple[int, int]:
        major, minor = self._nvrtc.getVersion()
        return int(major), int(minor)

    def architectures(self) -> list[int]:
        return [int(value) for value in self._nvrtc.getSupportedArchs()]

    def compile(self, program: Program, options: Sequence[str]) -> bytes:
        handle = self._nvrtc.createProgram(
            program.source, program.name, list(program.headers.values()), list(program.headers)
        )
        try:
            try:
                self._nvrtc.compileProgram(handle, list(options))
            except self._nvrtc.NVRTCError as error:
                raise CompileError(self._nvrtc.getProgramLog(handle) or str(error)) from error
            return bytes(self._nvrtc.getCUBIN(handle))
        finally:
            self._nvrtc.destroyProgram(handle)


# The one that came with torch first: code of a newer toolkit may be too new for the driver.
WAYS: tuple[tuple[str, Callable[[], Nvrtc]], ...] = (
    ("the library in NVIDIA's wheels", LibraryNvrtc),
    ("cuda-bindings", BindingsNvrtc),
    ("CuPy", CupyNvrtc),
)


def find(refusals: list[str]) -> Iterator[Nvrtc]:
    """Every way that this Python has; why not, of the others, goes into ``refusals``."""
    for name, way in WAYS:
        try:
            yield way()
        except Exception as error:  # each has its own ways to be missing or broken
            refusals.append(f"{name}: {type(error).__name__}: {error}")
