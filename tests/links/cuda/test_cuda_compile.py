"""Kernels compiled where they run: the cache, the choice of an architecture, and what is said where it cannot be."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from superoffload.errors import ArgumentError, KernelsUnavailable
from superoffload.links.cuda import compile as compiling
from superoffload.links.cuda.compile import CompileError, Nvrtc, Program, compile_kernels
from superoffload.links.cuda.link import LIBRARY_VARIABLE, cuda_link, kernels_for
from tests.support.fake_cuda import IMAGE, Fake, FakeDevice


class Compiler(Nvrtc):
    """An NVRTC that gives back what it was asked for."""

    def __init__(self, version: tuple[int, int] = (13, 0), architectures: Sequence[int] = (80, 90, 100)) -> None:
        self.name = "made up"
        self.asked: list[list[str]] = []
        self._version = version
        self._architectures = list(architectures)

    def version(self) -> tuple[int, int]:
        return self._version

    def architectures(self) -> list[int]:
        return self._architectures

    def compile(self, program: Program, options: Sequence[str]) -> bytes:
        self.asked.append(list(options))
        return b"\x7fELF" + " ".join(options).encode()


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler()
    monkeypatch.setattr(compiling, "find_compilers", lambda refusals: iter([made]))
    return made


def test_what_was_compiled_is_kept(compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another architecture, compiler or source is another file; a damaged file is compiled again. Options forbid what
    changes bits."""
    folder = tmp_path / "new" / "folder"
    first = compile_kernels("sm_90", cache=folder)
    wanted = {"--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true", "--gpu-architecture=sm_90"}
    assert first.startswith(b"\x7fELF") and wanted <= set(compiler.asked[0])
    assert not [option for option in compiler.asked[0] if "fast" in option]
    (path,) = folder.iterdir()
    kept = path.read_bytes()
    assert compile_kernels("sm_90", cache=folder) == first and len(compiler.asked) == 1
    for damaged in (b"", b"\x7fELF", kept[:-1] + bytes([kept[-1] ^ 1])):
        path.write_bytes(damaged)
        assert compile_kernels("sm_90", cache=folder) == first and path.read_bytes() == kept
    assert compile_kernels("sm_80", cache=folder) != first
    names = sorted(path.name for path in folder.iterdir())
    assert [name.split("-")[0] for name in names] == ["sm_80", "sm_90"]  # and nothing half-written
    compiler._version = (13, 1)
    compile_kernels("sm_90", cache=folder)
    program, options = compiling.load_program()
    changed = Program(program.name, program.source, {**program.headers, "pack.cuh": "// another"})
    monkeypatch.setattr(compiling, "load_program", lambda: (changed, options))
    compile_kernels("sm_90", cache=folder)
    assert len(compiler.asked) == 7 and len(list(folder.iterdir())) == 4
    with pytest.warns(RuntimeWarning, match=r"compiled anew by every process.*XDG_CACHE_HOME"):
        assert compile_kernels("sm_90", cache=path) == first


def test_an_architecture_that_is_too_new_gets_the_closest_before_it(compiler: Compiler, tmp_path: Path) -> None:
    compile_kernels("sm_103", cache=tmp_path)
    assert compiler.asked[0][-1] == "--gpu-architecture=sm_100"
    with pytest.raises(
        KernelsUnavailable, match=r"no kernels for sm_120.*made up: it compiles for sm_80, sm_90, sm_100"
    ):
        compile_kernels("sm_120", cache=tmp_path)
    with pytest.raises(KernelsUnavailable, match="no kernels for sm_75"):  # code for newer ones does not run there
        compile_kernels("sm_75", cache=tmp_path)
    with pytest.raises(ArgumentError, match="expected an architecture such as 'sm_90'"):
        compile_kernels("sm_90; rm")


# ---- where NVRTC is found ----


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Folders as wheels, torch and a toolkit have them; whatever is found there opens."""
    names: list[str] = []

    def open_library(name: str) -> object:
        if not os.path.isabs(name):
            raise OSError(f"{name}: cannot open shared object file")
        names.append(name)
        return object()

    wheels = SimpleNamespace(submodule_search_locations=[str(tmp_path / "nvidia")])
    monkeypatch.setattr(compiling, "find_spec", lambda name: wheels)
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setattr("superoffload.links.cuda.compile.ctypes.CDLL", open_library)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    return names


def put(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).touch()


@pytest.mark.parametrize(("version", "first"), [("13.0", "cu13"), ("12.8", "cuda_nvrtc"), (None, "cuda_nvrtc")])
def test_that_of_torchs_cuda_comes_first(
    opened: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str | None, first: str
) -> None:
    """Where two versions of CUDA are installed; builtins, aliases and other libraries are no compilers."""
    monkeypatch.setattr(torch.version, "cuda", version)
    nvidia = tmp_path / "nvidia"
    put(nvidia / "cuda_nvrtc" / "lib", "libnvrtc.so.12", "libnvrtc-builtins.so.12.8", "libnvrtc.alt.so.12")
    put(nvidia / "cu13" / "lib", "libnvrtc.so.13", "libnvrtc-builtins.so.13.0", "libcudart.so.13")
    found = [Path(one.name).relative_to(nvidia).parts for one in compiling.find_compilers([])]
    assert len(found) == 2 and found[0][0] == first
    assert {parts[-1] for parts in found} == {"libnvrtc.so.12", "libnvrtc.so.13"}
    names = [Path(name).name for name in opened]
    assert names.index("libnvrtc-builtins.so.13.0") < names.index("libnvrtc.so.13"), "which may not find it itself"


def test_without_nvrtc_it_says_what_was_tried(opened: list[str], tmp_path: Path) -> None:
    with pytest.raises(KernelsUnavailable, match=r"superoffload\[cuda13\]") as caught:
        compile_kernels("sm_90", cache=tmp_path)
    tried = str(caught.value).partition("Tried: ")[2]
    for folder in compiling.folders():
        assert str(folder) in tried
    assert "libnvrtc.so.13: cannot open" in tried and "libnvrtc.so.12: cannot open" in tried
    put(tmp_path / "torch" / "lib", "libnvrtc.so.11")
    with pytest.raises(KernelsUnavailable) as caught:
        compile_kernels("sm_90", cache=tmp_path)
    assert f"{tmp_path / 'torch' / 'lib' / 'libnvrtc.so.11'}: has no nvrtcGetNumSupportedArchs" in str(caught.value)


# ---- from a torch device to its link ----


def test_a_link_for_a_torch_device(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything between parameters on a device and the link, but the device itself."""
    compiled = mock.Mock(return_value=IMAGE)
    monkeypatch.setenv(LIBRARY_VARIABLE, fake.library)
    monkeypatch.setattr("superoffload.links.cuda.link.TorchDevice", lambda device: FakeDevice(fake))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(compiling, "compile_kernels", compiled)
    for keep_grads in (True, None):
        link = cuda_link(torch.device("cuda", 0), keep_grads=keep_grads)
        assert compiled.call_args.args == ("sm_90",) and link.pinned and link.frees_gradients is (keep_grads is None)
        link.close()
    monkeypatch.setattr(compiling, "compile_kernels", mock.Mock(side_effect=KernelsUnavailable("install something")))
    with pytest.warns(RuntimeWarning, match=r"install something.*with the same result"):
        assert kernels_for((8, 0)) == b""


# ---- with the real compiler, where there is one ----


def test_nvrtc_compiles_the_kernels(tmp_path: Path) -> None:
    compiler = next(compiling.find_compilers([]), None)
    if compiler is None:
        pytest.skip("needs NVRTC (pip install nvidia-cuda-nvrtc)")
    program, options = compiling.load_program()
    cubin = compile_kernels("sm_90", cache=tmp_path)
    assert cubin.startswith(b"\x7fELF")
    assert compiler.described == f"NVRTC {'.'.join(map(str, compiler.version()))} ({compiler.name})"
    for kernel in ("pack_bf16", "unpack_16", "step_bf16_bf16_noisy"):
        assert kernel.encode() in cubin
    broken = Program(program.name, program.source + "\nnonsense", program.headers)
    with pytest.raises(CompileError, match=r"kernels\.cu.*error"):
        compiler.compile(broken, [*options, "--gpu-architecture=sm_90"])
