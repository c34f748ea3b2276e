"""Two ranks for all tests of this folder, and the reason why they are skipped where DeepSpeed is not installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkout import ROOT
from tests.support.deepspeed.ranks import Ranks

os.environ.setdefault("DS_ACCELERATOR", "cpu")
# What DeepSpeed compiles goes below build/, with the ninja that was installed next to this Python.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
if importlib.util.find_spec("deepspeed") is not None:
    _BUILD = ROOT / "build" / "torch_extensions"
    _VERSION = importlib.metadata.version("deepspeed")
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(_BUILD / f"deepspeed-{_VERSION}"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("deepspeed") is None:
        here = os.path.dirname(__file__)
        for item in items:
            if str(item.path).startswith(here):
                item.add_marker(pytest.mark.skip(reason="needs DeepSpeed: pip install 'superoffload[deepspeed]'"))


def build_kernel() -> str | None:
    """Compiles DeepSpeed's own Adam; returns None, or why it cannot be had."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    try:
        CPUAdamBuilder().load()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.fixture(scope="package")  # they take much memory, so they end with the last of these tests
def two_ranks() -> Iterator[Ranks]:
    group = Ranks(2)
    forked_from, _ = group.run(os.getppid)
    yield group
    group.close()
    os.kill(forked_from, signal.SIGTERM)  # later ranks, if any, start another


@pytest.fixture(scope="module")
def kernel(two_ranks: Ranks) -> None:
    """DeepSpeed's own Adam kernel is built, with which stock and upstream step."""
    if shutil.which("ninja") is None or shutil.which("g++") is None:
        pytest.skip("needs ninja and g++, to compile DeepSpeed's kernel")
    for reason in two_ranks.run(build_kernel, timeout=280):
        if reason is not None:
            pytest.skip(f"DeepSpeed's kernel cannot be built here: {reason}")
