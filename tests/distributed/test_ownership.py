"""What each rank owns of a parameter: boxes, computed from a DTensor's placements and compared over ranks."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Partial, _StridedShard

from superoffload import AdamW
from superoffload.distributed.boxes import Box, misfit
from superoffload.distributed.owners import OwnersTable, Pair
from superoffload.distributed.ownership import dtensor_holding
from superoffload.distributed.placements import check_strided
from superoffload.errors import ArgumentError
from tests.support.meshes import LAYOUTS, laid_out, whole_model
from tests.support.rank_processes import error_of, mesh_of, on_ranks

# ---- boxes --------------------------------------------------------------------------------------------------------


def test_a_box_selects_its_elements() -> None:
    whole = torch.arange(60).view(3, 4, 5)
    box = Box((1, 0, 2), (2, 4, 3))
    assert torch.equal(box.of(whole), whole[1:3, :, 2:5]) and box.numel == 24
    assert box.first_in(whole.shape) == whole[1, 0, 2]
    assert Box((), ()).of(torch.tensor(3)).item() == 3 and Box((), ()).numel == 1


def test_a_box_inside_of_another() -> None:
    outer = Box((2, 0), (4, 6))
    assert Box((3, 1), (2, 2)).within(outer) == Box((1, 1), (2, 2))
    assert Box((2, 0), (4, 6)).within(outer) == Box((0, 0), (4, 6))
    for outside in (Box((1, 1), (2, 2)), Box((3, 5), (1, 2)), Box((5, 0), (2, 1))):
        assert outside.within(outer) is None


GRID = [Box((r, c), (h, w)) for r, h in ((0, 2), (2, 3)) for c, w in ((0, 1), (1, 3), (4, 2))]


def test_boxes_that_fit() -> None:
    assert misfit((5, 6), GRID) is None
    assert misfit((5, 6), [*GRID, Box((5, 0), (0, 6))]) is None, "an empty one does not count"
    assert misfit((), [Box((), ())]) is None
    assert misfit((0, 3), []) is None


@pytest.mark.parametrize("left_out", range(len(GRID)))
def test_a_missing_box_is_found(left_out: int) -> None:
    boxes = [box for i, box in enumerate(GRID) if i != left_out]
    found = misfit((5, 6), boxes)
    assert found is not None and "in no part" in found.what


def test_every_box_moved_by_one_is_found() -> None:
    for i, dim, by in itertools.product(range(len(GRID)), (0, 1), (-1, 1)):
        moved = list(GRID)
        offsets = list(moved[i].offsets)
        offsets[dim] += by
        moved[i] = Box(tuple(offsets), moved[i].lengths)
        assert misfit((5, 6), moved) is not None


# ---- owners -------------------------------------------------------------------------------------------------------


def pair(*runs: tuple[int, int]) -> Pair:
    return tuple(o for o, _ in runs), tuple(n for _, n in runs)


def test_ranks_with_the_same_box_are_replicas() -> None:
    left, right, nothing = pair((0, 4), (0, 3)), pair((0, 4), (3, 3)), pair((4, 0), (0, 6))
    owners = OwnersTable().owners("w", (4, 6), (3, 5, 6, 8, 9), [left, right, left, nothing, nothing])
    assert owners.replicas.groups == ((3, 6), (5,), (8,), (9,)), "empty parts are no replicas"
    assert dict(owners.parts()) == {3: Box(*left), 5: Box(*right)}
    assert [owners.writer_of(rank) for rank in (3, 5, 6, 8)] == [3, 5, 3, None]
    empty = OwnersTable().owners("w", (0, 6), (3, 5), [pair((0, 0), (0, 6))] * 2)
    assert [empty.writer_of(rank) for rank in (3, 5)] == [3, 3], "a file lists an empty parameter too"


@pytest.mark.parametrize(
    ("told", "text"),
    [
        ([pair((0, 4), (0, 3)), pair((0, 4), (2, 4))], "w: index 2 of dimension 1 is in several parts"),
        ([pair((0, 2), (0, 6)), pair((0, 2), (0, 6))], "w: indices 2 to 3 of dimension 0 are in no part"),
        ([pair((0, 2), (0, 6)), pair((2, 2), (0, 5))], r"rank 1: 2 to 3 x 0 to 4"),
        ([pair((0, 4), (0, 6)), pair((0, 4), (0, 3))], "several parts"),
    ],
)
def test_parts_that_overlap_or_leave_a_gap_are_refused(told: list[Pair], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        OwnersTable().owners("w", (4, 6), (0, 1), told)


# ---- placements ---------------------------------------------------------------------------------------------------


def boxes_agree(name: str) -> int:
    """Every local part is the box of the whole tensor that torch itself gathers; the number of parameters."""
    layout = LAYOUTS[name]
    model, whole = laid_out(layout), dict(whole_model(layout).named_parameters())
    seen = 0
    for key, param in model.named_parameters():
        if isinstance(param, DTensor):
            box = dtensor_holding(key, param).box
            assert torch.equal(box.of(whole[key]), param.to_local()), key
            assert torch.equal(param.full_tensor(), whole[key]), key
            seen += 1
    return seen


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_local_part_is_its_box(name: str) -> None:
    assert all(on_ranks(LAYOUTS[name].ranks, boxes_agree, name))


SHAPES = [(8, 8), (7, 5), (1, 9), (3, 2, 5), (13,), (2, 0)]


def any_placements() -> int:
    """All placements of two mesh dimensions without _StridedShard, with uneven and empty parts."""
    mesh = mesh_of(2, 2)
    seen = 0
    for shape in SHAPES:
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        choices = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
        for placements in itertools.product(choices, repeat=2):
            param = distribute_tensor(whole, mesh, placements)
            assert torch.equal(dtensor_holding("w", param).box.of(whole), param.to_local()), (shape, placements)
            seen += 1
    return seen


def test_any_placements() -> None:
    assert on_ranks(4, any_placements) == [sum((1 + len(shape)) ** 2 for shape in SHAPES)] * 4


def refused(what: str) -> str:
    mesh = mesh_of(2, 2)
    rank = dist.get_rank()
    placements: Any = (Shard(0), Shard(1))
    local, group = torch.zeros(4, 4), None
    if what == "partial":
        placements, local = (Replicate(), Partial()), torch.zeros(8, 8)
    elif what == "factor":
        placements, local = (_StridedShard(0, split_factor=4), Shard(0)), torch.zeros(2, 8)
    elif what == "not after":
        placements, local = (Replicate(), _StridedShard(0, split_factor=2)), torch.zeros(4, 8)
    elif what == "local":
        local = torch.zeros(4, 3)
    elif what == "group":
        group = [dist.new_group(pair) for pair in ([0, 1], [2, 3])][rank // 2]
    param = nn.Parameter(
        DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size((8, 8)), stride=(8, 1))
    )
    return error_of(lambda: AdamW([param], threads=1, process_group=group))


@pytest.mark.parametrize(
    ("what", "texts"),
    [
        ("partial", ["ArgumentError: param_groups[0]['params'][0]: ", "(Partial)", "redistribute it"]),
        ("factor", ["split_factor is 4, expected the number of parts"]),
        ("not after", ["split_factor is 2, expected the number of parts"]),
        ("local", ["this rank's part has shape (4, 3), expected (4, 4) of (8, 8)"]),
        ("group", ["in no part", "Is a mesh, or process_group=, too small?"]),
    ],
)
def test_layouts_that_no_rank_can_serve_are_refused(what: str, texts: list[str]) -> None:
    for message in on_ranks(4, refused, what):
        assert all(text in message for text in texts), message


def a_torch_that_gathers_otherwise() -> str:
    """The meaning of _StridedShard is not documented, so another torch may have another."""
    mesh = mesh_of(2, 2)
    placements = (_StridedShard(0, split_factor=2), Shard(0))
    param = DTensor.from_local(
        torch.zeros(2, 3), mesh, placements, run_check=False, shape=torch.Size((8, 3)), stride=(3, 1)
    )
    check_strided([("w", param)])
    gathered = torch.tensor([0, 1, 4, 5, 2, 3, 6, 7])
    with mock.patch.object(DTensor, "full_tensor", lambda *_: gathered):
        return error_of(lambda: check_strided([("w", param)]))


def test_another_meaning_of_strided_shard_is_found() -> None:
    for message in on_ranks(4, a_torch_that_gathers_otherwise):
        assert "w: torch" in message and "gathers dimension 0" in message and "[0, 1, 4, 5, 2, 3, 6, 7]" in message
