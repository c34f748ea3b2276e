"""`python -m benchmarks.ranks --on-paper` and `--meshes`: what they count and refuse. No time is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from benchmarks.ranks.on_paper import Layout, held_by, messages_of, session_of
from superoffload.distributed.boxes import Box
from superoffload.distributed.placements import box_at
from tests.support.benchmarks import bench as start


def test_every_parameter_is_covered_once_on_every_mesh(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The real session raises otherwise."""
    assert start("ranks", "--on-paper", "64", "--json", str(tmp_path / "out.json")) == 0
    rows = {row["name"]: row for row in json.loads((tmp_path / "out.json").read_text())["rows"]}
    assert set(rows) == {"FSDP 64", "FSDP 8 x TP 8", "PP 4 x FSDP 2 x TP 8"}
    assert {row["step_bytes"] for row in rows.values()} == {128}, "whatever the mesh"
    assert {row["numel"] for row in rows.values()} == {8_030_261_248}
    assert [row["exchanges"] for row in rows.values()] == [1, 1, 2], "only stages tell their names"
    assert "8.03 billion parameters on 64 ranks" in capsys.readouterr().out


def test_ranks_of_tensor_parallelism_share_norms() -> None:
    layout = Layout(stages=1, shards=2, tensor=8)
    session, _ = session_of(layout, 5, messages_of(layout))
    held = held_by(layout, 5)
    session.add(held)
    writers = {one.name: session.writer_of(index) for index, one in enumerate(held)}
    assert writers["norm.weight"] == 0 and writers["blocks.3.mlp.down.weight"] == 5


def test_boxes_of_any_rank() -> None:
    placements = (_StridedShard(0, split_factor=2), Shard(0))
    boxes = [box_at("w", (10, 3), placements, (2, 2), (data, tensor)) for tensor in (0, 1) for data in (0, 1)]
    assert boxes == [Box((0, 0), (3, 3)), Box((3, 0), (2, 3)), Box((5, 0), (3, 3)), Box((8, 0), (2, 3))]
    assert box_at("n", (5,), (Shard(0), Replicate()), (2, 2), (1, 0)) == Box((3,), (2,))


@pytest.mark.convergence
def test_meshes_are_measured(tmp_path: Path) -> None:
    small = ["--hidden", "32", "--layers", "2", "--rows", "2", "--rounds", "1", "--steps", "1"]
    assert start("ranks", "--meshes", *small, "--json", str(tmp_path / "out.json")) == 0
    rows = {row["name"]: row for row in json.loads((tmp_path / "out.json").read_text())["rows"]}
    assert set(rows) == {"fully_shard alone", "tensor parallelism", "pipeline stages", "experts"}
    for row in rows.values():
        assert 0 < row["told_seconds_median"] < row["made_seconds_median"]
        assert 0 < row["exchange_seconds_median"] < row["step_seconds_median"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--on-paper 100", "on_paper=100: expected a multiple of 32, at least 64"),
        ("--meshes --ranks 3", "engine=tp with ranks=3: two ranks share each matrix; expected an even number"),
        ("--meshes --layers 3", "rows=4, layers=3: expected even numbers"),
    ],
)
def test_refusals(options: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert start("ranks", *options.split()) != 0
    assert text in capsys.readouterr().err
