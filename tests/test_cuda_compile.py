"""Kernels compiled where they run: the cache, the choice of an architecture, and what is said where it cannot be."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from superoffload.cuda import compile as compiling
from superoffload.cuda import nvrtc
from superoffload.cuda.compile import compile_kernels
from superoffload.cuda.nvrtc import CompileError, Nvrtc, Program
from superoffload.errors import ArgumentError, KernelsUnavailable


class Compiler:
    """An NVRTC that gives back what it was asked for."""

    name = "made up"

    def __init__(self, version: tuple[int, int] = (13, 0), architectures: Sequence[int] = (80, 90, 100)) -> None:
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
    monkeypatch.setattr(nvrtc, "WAYS", (("made up", lambda: made),))
    return made


def test_options_forbid_what_changes_bits(compiler: Compiler, tmp_path: Path) -> None:
    cubin = compile_kernels("sm_90", cache=tmp_path)
    assert cubin.startswith(b"\x7fELF")
    wanted = {"--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true", "--gpu-architecture=sm_90"}
    assert wanted <= set(compiler.asked[0])
    assert not [option for option in compiler.asked[0] if "fast" in option]


def test_what_was_compiled_is_kept(compiler: Compiler, tmp_path: Path) -> None:
    first = compile_kernels("sm_90", cache=tmp_path / "new" / "folder")
    assert compile_kernels("sm_90", cache=tmp_path / "new" / "folder") == first
    assert len(compiler.asked) == 1
    assert compile_kernels("sm_80", cache=tmp_path / "new" / "folder") != first
    assert len(compiler.asked) == 2
    names = sorted(path.name for path in (tmp_path / "new" / "folder").iterdir())
    assert [name.split("-")[0] for name in names] == ["sm_80", "sm_90"]  # and nothing half-written


def test_another_compiler_or_source_is_another_file(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_kernels("sm_90", cache=tmp_path)
    compiler._version = (13, 1)
    compile_kernels("sm_90", cache=tmp_path)
    program, options = compiling.load_program()
    changed = Program(program.name, program.source, {**program.headers, "pack.cuh": "// another"})
    monkeypatch.setattr(compiling, "load_program", lambda: (changed, options))
    compile_kernels("sm_90", cache=tmp_path)
    assert len(compiler.asked) == len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("damage", [b"", b"\x7fELF", None])
def test_a_damaged_file_is_compiled_again(compiler: Compiler, tmp_path: Path, damage: bytes | None) -> None:
    whole = compile_kernels("sm_90", cache=tmp_path)
    (path,) = tmp_path.iterdir()
    kept = path.read_bytes()
    path.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]) if damage is None else damage)
    assert compile_kernels("sm_90", cache=tmp_path) == whole
    assert len(compiler.asked) == 2
    assert path.read_bytes() == kept


def test_kernels_without_a_place_to_keep_them(compiler: Compiler, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.warns(RuntimeWarning, match=r"compiled anew by every process.*XDG_CACHE_HOME") as caught:
        assert compile_kernels("sm_90", cache=blocked).startswith(b"\x7fELF")
    assert caught[0].filename == __file__


def test_cache_folder_follows_the_environment(tmp_path: Path) -> None:
    assert compiling.cache_folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "superoffload" / "kernels"
    for unusable in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "not/absolute"}):
        assert compiling.cache_folder(unusable) == Path.home() / ".cache" / "superoffload" / "kernels"


def test_an_architecture_that_is_too_new_gets_the_closest_before_it(compiler: Compiler, tmp_path: Path) -> None:
    compile_kernels("sm_103", cache=tmp_path)
    assert compiler.asked[0][-1] == "--gpu-architecture=sm_100"
    with pytest.raises(
        KernelsUnavailable, match=r"no kernels for sm_120.*NVRTC 13.0 compiles for sm_80, sm_90, sm_100"
    ):
        compile_kernels("sm_120", cache=tmp_path)
    with pytest.raises(KernelsUnavailable, match="no kernels for sm_75"):  # code for newer ones does not run there
        compile_kernels("sm_75", cache=tmp_path)


@pytest.mark.parametrize("arch", ["90", "sm_", "compute_90", "sm_90; rm", ""])
def test_wrong_architectures_are_refused(arch: str) -> None:
    with pytest.raises(ArgumentError, match="expected an architecture such as 'sm_90'"):
        compile_kernels(arch)


def test_without_nvrtc_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Nvrtc:
        raise ImportError("No module named 'cuda'")

    monkeypatch.setattr(nvrtc, "WAYS", (("cuda-bindings", missing),))
    with pytest.raises(KernelsUnavailable, match=r"superoffload\[cuda\].*cuda-bindings: ImportError: No module named"):
        compile_kernels("sm_90", cache=tmp_path)


def test_the_next_way_is_tried_and_logs_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Compiler):
        name = "broken"

        def compile(self, program: Program, options: Sequence[str]) -> bytes:
            raise CompileError("kernels.cu(3): error: expected a ;")

    monkeypatch.setattr(nvrtc, "WAYS", (("broken", Broken), ("made up", Compiler)))
    assert compile_kernels("sm_90", cache=tmp_path).startswith(b"\x7fELF")
    monkeypatch.setattr(nvrtc, "WAYS", (("broken", Broken),))
    with pytest.raises(KernelsUnavailable, match=r"broken: kernels.cu\(3\): error: expected a ;"):
        compile_kernels("sm_80", cache=tmp_path)


# ---- with the real compiler, where there is one ----


def real_compilers() -> Iterator[tuple[str, Nvrtc]]:
    for name, way in nvrtc.WAYS:
        try:
            yield name, way()
        except Exception:  # not installed; the tests that need one say so
            continue


@pytest.mark.parametrize("name", [name for name, _ in nvrtc.WAYS])
def test_nvrtc_compiles_the_kernels(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = dict(real_compilers()).get(name)
    if compiler is None:
        pytest.skip(f"needs NVRTC by way of {name} (pip install nvidia-cuda-nvrtc cuda-bindings, or CuPy)")
    program, options = compiling.load_program()
    monkeypatch.setattr(nvrtc, "WAYS", ((name, lambda: compiler),))
    cubin = compile_kernels("sm_90", cache=tmp_path)
    assert cubin.startswith(b"\x7fELF")
    for kernel in ("pack_bf16_f32", "unpack_f32_f16", "step_bf16_bf16_noisy"):
        assert kernel.encode() in cubin
    broken = Program(program.name, program.source + "\nnonsense", program.headers)
    with pytest.raises(CompileError, match=r"kernels\.cu.*error"):
        compiler.compile(broken, [*options, "--gpu-architecture=sm_90"])


def test_sources_are_found_in_the_repository() -> None:
    folder = compiling.source_folder()
    assert os.path.samefile(folder, Path(__file__).resolve().parents[1] / "csrc" / "cuda")
    program, _ = compiling.load_program()
    included = [line.split('"')[1] for line in program.source.splitlines() if line.startswith("#include")]
    assert set(included) <= set(program.headers)
    assert "#include <" not in program.source + "".join(program.headers.values())  # NVRTC has no system headers
