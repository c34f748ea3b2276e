"""Compiles the kernels of csrc/cuda for one architecture by NVRTC, on the user's machine, and keeps them on disk."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from superoffload.errors import ArgumentError, KernelsUnavailable
from superoffload.links.cuda import nvrtc
from superoffload.links.cuda.nvrtc import CompileError, Nvrtc, Program

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
    for compiler in nvrtc.find(refusals):
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
        warnings.warn(
            f"kernels are compiled anew by every process: they cannot be kept in {folder} ({error}); "
            "XDG_CACHE_HOME names another place",
            RuntimeWarning,
            stacklevel=3,
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
