"""The safetensors format: read and written as the safetensors package does, and files that are not of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from superoffload.checkpoints.safetensors import TensorReader
from superoffload.errors import ArgumentError
from tests.support.saved_runs import TENSORS, save_two_steps


def test_the_safetensors_package_reads_what_we_write_and_we_its(tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors.torch", reason="needs safetensors: pip install safetensors")
    saved = save_two_steps(tmp_path)
    theirs = package.load_file(saved / TENSORS)
    ours = TensorReader(saved / TENSORS)
    assert set(theirs) == set(ours.entries)
    for name, value in theirs.items():
        mine = ours.tensor(name)
        assert mine.dtype == value.dtype and mine.shape == value.shape and torch.equal(mine, value)
    package.save_file({"a": torch.arange(5), "b": torch.ones(2, 3).bfloat16()}, tmp_path / "x.safetensors")
    reader = TensorReader(tmp_path / "x.safetensors")
    assert torch.equal(reader.tensor("a"), torch.arange(5))
    assert torch.equal(reader.tensor("b"), torch.ones(2, 3).bfloat16())


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0{}more", b"\x02\0\0\0\0\0\0\0[]"])
def test_files_that_are_no_safetensors(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ArgumentError, match="not a safetensors file, or damaged"):
        TensorReader(tmp_path / "x")


def test_headers_that_lie(tmp_path: Path) -> None:
    for entry in (
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 8]},
        {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
        {"shape": [2]},
    ):
        text = json.dumps({"a": entry}).encode()
        (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 8)
        with pytest.raises(ArgumentError, match="not a safetensors file, or damaged"):
            TensorReader(tmp_path / "x")
