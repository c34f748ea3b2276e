"""What each rank owns of a parameter: boxes, computed from a DTensor's placements and compared over ranks."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Partial, _StridedShard

from superoffload import AdamW
from superoffload.distributed.ownership import Box, OwnersTable, check_strided, dtensor_holding, like_parameter, misfit
from superoffload.errors import ArgumentError
from superoffload.host.tensors import local_of
from tests.support.meshes import LAYOUTS, laid_out, whole_model
from tests.support.rank_processes import error_of, mesh_of, on_ranks


def test_parts_that_overlap_or_leave_a_gap_are_refused() -> None:
    grid = [Box((r, c), (h, w)) for r, h in ((0, 2), (2, 3)) for c, w in ((0, 1), (1, 3), (4, 2))]
    assert misfit((5, 6), [*grid, Box((5, 0), (0, 6))]) is None, "an empty one does not count"
    assert misfit((), [Box((), ())]) is misfit((0, 3), []) is None
    for i, box in enumerate(grid):
        rest = [*grid[:i], *grid[i + 1 :]]
        found = misfit((5, 6), rest)
        assert found is not None and "in no part" in found.what
        for row, column in ((-1, 0), (1, 0), (0, -1), (0, 1)):
            moved = Box((box.offsets[0] + row, box.offsets[1] + column), box.lengths)
            assert misfit((5, 6), [*rest, moved]) is not None
    for first, second, words in (
        (((0, 0), (4, 3)), ((0, 2), (4, 4)), "w: index 2 of dimension 1 is in several parts"),
        (((0, 0), (2, 6)), ((0, 0), (2, 6)), "w: indices 2 to 3 of dimension 0 are in no part"),
        (((0, 0), (2, 6)), ((2, 0), (2, 5)), "rank 1: 2 to 3 x 0 to 4"),
    ):
        with pytest.raises(ArgumentError, match=words):
            OwnersTable().owners("w", (4, 6), (0, 1), [first, second])


# ---- placements ---------------------------------------------------------------------------------------------------


def boxes_agree() -> None:
    """Every local part is the box of the whole tensor that torch itself gathers: in our layouts, and with all
    placements on two mesh dimensions without _StridedShard, with uneven and empty parts."""
    for layout in (one for one in LAYOUTS.values() if one.ranks == 4):
        model, whole = laid_out(layout), dict(whole_model(layout).named_parameters())
        sharded = [(key, param) for key, param in model.named_parameters() if isinstance(param, DTensor)]
        assert sharded
        for key, param in sharded:
            assert torch.equal(dtensor_holding(key, param).box.of(whole[key]), param.to_local()), key
            assert torch.equal(param.full_tensor(), whole[key]), key
    for shape in ((8, 8), (7, 5), (1, 9), (3, 2, 5), (13,), (2, 0)):
        tensor = torch.arange(torch.Size(shape).numel()).view(shape)
        choices = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
        for placements in itertools.product(choices, repeat=2):
            part = distribute_tensor(tensor, mesh_of(2, 2), placements)
            assert torch.equal(dtensor_holding("w", part).box.of(tensor), part.to_local()), (shape, placements)


def test_a_local_part_is_its_box() -> None:
    on_ranks(4, boxes_agree)


def refused() -> dict[str, str]:
    mesh, rank = mesh_of(2, 2), dist.get_rank()
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    cases: dict[str, tuple[Any, tuple[int, int], Any]] = {
        "partial": ((Replicate(), Partial()), (8, 8), None),
        "factor": ((_StridedShard(0, split_factor=4), Shard(0)), (2, 8), None),
        "not after": ((Replicate(), _StridedShard(0, split_factor=2)), (4, 8), None),
        "local": ((Shard(0), Shard(1)), (4, 3), None),
        "group": ((Shard(0), Shard(1)), (4, 4), pairs[rank // 2]),
    }
    errors = {}
    for what, (placements, size, group) in cases.items():
        layout: Any = {"shape": torch.Size((8, 8)), "stride": (8, 1), "run_check": False}
        param = nn.Parameter(DTensor.from_local(torch.zeros(size), mesh, placements, **layout))
        errors[what] = error_of(partial(AdamW, [param], threads=1, process_group=group))
    return errors


def test_layouts_that_no_rank_can_serve_are_refused() -> None:
    for errors in on_ranks(4, refused):
        assert errors["partial"].startswith("ArgumentError: param_groups[0]['params'][0]: ")
        assert "(Partial)" in errors["partial"] and "redistribute it" in errors["partial"]
        assert "split_factor is 4, expected the number of parts" in errors["factor"]
        assert "split_factor is 2, expected the number of parts" in errors["not after"]
        assert "this rank's part has shape (4, 3), expected (4, 4) of (8, 8)" in errors["local"]
        assert "in no part" in errors["group"] and "process_group=, too small?" in errors["group"]


def a_torch_that_gathers_otherwise() -> str:
    """The meaning of _StridedShard is not documented, so another torch may have another."""
    placements: Any = (_StridedShard(0, split_factor=2), Shard(0))
    layout: Any = {"shape": torch.Size((8, 3)), "stride": (3, 1), "run_check": False}
    param = DTensor.from_local(torch.zeros(2, 3), mesh_of(2, 2), placements, **layout)
    check_strided([("w", param)])
    gathered = torch.tensor([0, 1, 4, 5, 2, 3, 6, 7])
    with mock.patch.object(DTensor, "full_tensor", lambda *_: gathered):
        return error_of(lambda: check_strided([("w", param)]))


def test_another_meaning_of_strided_shard_is_found() -> None:
    for message in on_ranks(4, a_torch_that_gathers_otherwise):
        assert "w: torch" in message and "gathers dimension 0" in message and "[0, 1, 4, 5, 2, 3, 6, 7]" in message


def test_state_of_a_dtensor_stays_where_it_is(tmp_path: Path) -> None:
    """`from_local` would move it to the mesh's device; here the mesh is the CPU's, so the state is on another one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        param = distribute_tensor(torch.randn(6, 4).bfloat16(), init_device_mesh("cpu", (1,)), [Shard(0)])
        for device in ("cpu", "meta"):
            state: Any = like_parameter(param, dtensor_holding("weight", param), torch.zeros(24, device=device))
            assert state.shape == param.shape and state.dtype is torch.float32
            assert state.placements == param.placements and state.device_mesh == param.device_mesh
            assert local_of(state).device.type == device
    finally:
        dist.destroy_process_group()
