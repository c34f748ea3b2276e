"""What is built, with which flags, what the package contains, and what its pinned requirements promise."""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.version import Version

import superoffload
import superoffload._native
from tests.support.checkout import ROOT
from tests.support.scripts import load_file

MACHINES = ("x86_64", "aarch64", "riscv64")


setup_py = load_file(ROOT / "setup.py")


def run(*command: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=200, **options)  # type: ignore[call-overload,no-any-return]


@pytest.fixture
def source_tree(tmp_path: Path) -> Path:
    """A copy of what a source archive is made from, so that building leaves nothing in the working tree."""
    tree = tmp_path / "tree"
    skipped = shutil.ignore_patterns("__pycache__", "*.so", ".*_cache")
    for name in ("csrc", "superoffload", "tests", "benchmarks", "requirements"):
        shutil.copytree(ROOT / name, tree / name, ignore=skipped)
    for path in ROOT.iterdir():
        if path.is_file() and path.name != ".git":
            shutil.copy(path, tree)
    return tree


# ---- which source gets which flags ----


@pytest.mark.parametrize("machine", MACHINES)
def test_only_its_own_file_gets_the_flags_of_an_instruction_set(machine: str) -> None:
    plan = setup_py.plan(machine, {})
    common = plan.sources["csrc/arm_adam/dispatch.cpp"]
    assert {"-ffp-contract=off", "-fno-fast-math", "-g0"} <= set(common), "no flag changes arithmetic"
    assert not {"-ffast-math", "-Ofast", "-funsafe-math-optimizations", "-mcpu=native", "-Werror"} & set(common)
    for source, flags in plan.sources.items():
        own = flags[len(common) :]
        assert flags[: len(common)] == common
        assert not own or source.startswith("csrc/arm_adam/isa_") or source == setup_py.BINDINGS
    assert not [flag for flag in common if flag.startswith("-m")]
    assert [flag for flag in common if flag.startswith("-D")] == [
        f"-DSUPEROFFLOAD_BUILT_{name.upper()}=1" for name in plan.isas
    ]
    assert all((ROOT / source).is_file() for source in plan.sources)


def test_instruction_sets_can_be_left_out_but_not_invented() -> None:
    assert setup_py.plan("x86_64", {"SUPEROFFLOAD_BUILD_ISAS": "avx2, scalar"}).isas == ["scalar", "avx2"]
    for wrong in ("avx2", "scalar,neon", "scalar,mmx"):
        with pytest.raises(setup_py.OptionError, match=r"SUPEROFFLOAD_BUILD_ISAS=.*out of scalar, avx2, avx512"):
            setup_py.plan("x86_64", {"SUPEROFFLOAD_BUILD_ISAS": wrong})


# ---- what is built ----


def test_a_build_without_a_compiler_says_what_to_install(source_tree: Path) -> None:
    for path in (source_tree / "csrc").rglob("*.cpp"):
        path.unlink()
    (source_tree / setup_py.BINDINGS).touch()
    environment = {**os.environ, "CC": "/nowhere/c++", "CXX": "/nowhere/c++"}
    shown = run(sys.executable, "setup.py", "build_ext", cwd=source_tree, env=environment)
    assert shown.returncode != 0 and "Traceback" not in shown.stderr
    assert all(word in shown.stderr for word in ("needs a C++17 compiler to build", "apt install g++"))


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf: install binutils")
def test_extension_needs_only_the_c_and_cpp_libraries() -> None:
    shown = run("readelf", "--dynamic", superoffload._native.__file__)
    needed = re.findall(r"\(NEEDED\).*\[(.+?)\]", shown.stdout)
    allowed = re.compile(r"(libc|libm|libstdc\+\+|libgcc_s|libpthread|libc\+\+|libatomic|ld-linux.*)\.so")
    assert needed and [name for name in needed if not allowed.match(name)] == []


# ---- what is shipped ----


def test_everything_that_any_machine_compiles_is_shipped(source_tree: Path, tmp_path: Path) -> None:
    """In the archive of the sources, and in the package those of the accelerator's kernels."""
    program = f"from setuptools.build_meta import build_sdist; print(build_sdist({str(tmp_path)!r}))"
    shown = run(sys.executable, "-c", program, cwd=source_tree)
    assert shown.returncode == 0, shown.stderr
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    wanted = {path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").rglob("*") if path.is_file()}
    wanted |= {source for machine in MACHINES for source in setup_py.plan(machine, {}).sources}
    wanted |= {"LICENSE", "Makefile", "pyproject.toml", "setup.py", "superoffload/py.typed", "requirements/test.txt"}
    assert wanted - names == set()
    assert [name for name in names if name.endswith((".so", ".o", ".pyc"))] == []
    shown = run(sys.executable, "setup.py", "build_py", "--build-lib", tmp_path, cwd=source_tree)
    assert shown.returncode == 0, shown.stderr
    shipped = {path.name: path.read_bytes() for path in (tmp_path / "superoffload/links/cuda/sources").iterdir()}
    kernels = [path for pattern in ("*.cu", "*.cuh", "options.txt") for path in (ROOT / "csrc/cuda").glob(pattern)]
    assert shipped == {path.name: path.read_bytes() for path in kernels} and "options.txt" in shipped


# ---- releases ----


def test_a_release_dates_the_changelog_and_sets_the_version(tmp_path: Path) -> None:
    release = load_file(ROOT / "scripts/release.py")
    (tmp_path / "superoffload").mkdir()
    version, log = tmp_path / "superoffload/_version.py", tmp_path / "CHANGELOG.md"
    version.write_text('"""The version."""\n\n__version__ = "0.9.1"\n')
    log.write_text("# Changelog\n\n## [Unreleased]\n\n- New.\n\n## [0.9.1] - 2026-01-01\n")
    before = version.read_text(), log.read_text()
    for wrong in ("0.9.1", "0.9", "0.8.9", "1.0.0rc1"):
        with pytest.raises(release.ReleaseError, match=rf"--version {re.escape(wrong)}: .*higher than 0\.9\.1"):
            release.set_version(wrong, tmp_path)
    assert before == (version.read_text(), log.read_text())
    release.set_version("0.10.0", tmp_path, datetime.date(2026, 2, 3))
    assert '__version__ = "0.10.0"\n' in version.read_text()
    assert "## [Unreleased]\n\n## [0.10.0] - 2026-02-03\n\n- New.\n\n## [0.9.1]" in log.read_text()
    with pytest.raises(release.ReleaseError, match="nothing under"):
        release.set_version("0.11.0", tmp_path)


# ---- pinned requirements ----


def pinned(name: str) -> list[Requirement]:
    lines = (line.split("#", 1)[0].strip() for line in (ROOT / "requirements" / name).read_text().splitlines())
    return [Requirement(line) for line in lines if line and not line.startswith("-r ")]


# What `make test` installs.
TESTS = (
    "demo.txt",
    "deepspeed.txt",
    "integrations.txt",
    "test.txt",
    "torchtitan.txt",
    "megatron.txt",
    "verl.txt",
    "axolotl.txt",
)


def test_every_requirement_is_pinned_to_one_version_and_named_once() -> None:
    for requirement in [each for name in ("docs.txt", *TESTS) for each in pinned(name)]:
        assert [spec.operator for spec in requirement.specifier] == ["=="], str(requirement)
        assert "*" not in str(requirement.specifier), str(requirement)
    for python in ("3.10", "3.11", "3.12", "3.13"):
        names = [each.name.lower() for file in TESTS for each in pinned(file) if applies(each.marker, python)]
        assert len(names) == len(set(names))


def applies(marker: Marker | None, python: str) -> bool:
    return marker is None or marker.evaluate({"python_version": python})


def test_pins_satisfy_the_package_and_its_extras() -> None:
    pins = {each.name.lower(): each for file in TESTS for each in pinned(file)}
    for requirement in (Requirement(line) for line in importlib.metadata.requires("superoffload") or []):
        pin = pins.get(requirement.name.lower())
        if pin is not None:
            version = next(iter(pin.specifier)).version
            assert requirement.specifier.contains(Version(version)), f"{requirement} excludes the pinned {version}"
