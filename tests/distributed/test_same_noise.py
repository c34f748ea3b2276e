"""Rounded moments have the same bits on every mesh where the gradients have: noise is keyed by name and place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

from superoffload import AdamW
from tests.support.rank_processes import mesh_of, on_ranks
from tests.support.split_masters import same_bits

SHAPES = {"rows.weight": (64, 40), "columns.weight": (24, 70), "experts.weight": (4, 30, 28)}
CUTS: dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]] = {
    "rows and columns": ((2, 2), (Shard(0), Shard(1))),
    "last dimension, uneven": ((4,), (Shard(-1),)),
}


def values(seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=random).bfloat16() for name, shape in SHAPES.items()}


def trained(names: list[str], cut: str | None, speculation: str) -> dict[str, list[Tensor]]:
    """Parameter, master and moments, whole, after steps with given gradients."""

    def laid_out(tensor: Tensor) -> Tensor:
        if cut is None:
            return tensor.clone()
        sizes, placements = CUTS[cut]
        whole: Tensor = distribute_tensor(tensor, mesh_of(*sizes), placements)
        return whole

    params = {name: nn.Parameter(laid_out(values(0)[name])) for name in names}
    with AdamW(list(params.items()), lr=1e-2, state_dtype="bf16", seed=3, speculation=speculation) as optimizer:
        for step in range(1, 5):
            optimizer.zero_grad()
            for name, param in params.items():
                (param * 1.0).backward(laid_out(values(step)[name]))
            optimizer.step()
        optimizer.synchronize()
        found = {}
        for name, param in params.items():
            state = optimizer.state[param]
            kept = (param.detach(), state["master"], state["exp_avg"], state["exp_avg_sq"])
            found[name] = [one.full_tensor() if isinstance(one, DTensor) else one.clone() for one in kept]
        return found


def same_as_whole(cut: str) -> None:
    """Whole parameters come in another order."""
    parts, whole = trained(list(SHAPES), cut, "always"), trained(list(reversed(SHAPES)), None, "never")
    for name in SHAPES:
        assert all(map(same_bits, parts[name], whole[name])), name


@pytest.mark.parametrize("cut", CUTS)
def test_parts_have_the_bits_of_the_whole_parameter(cut: str) -> None:
    on_ranks(4, same_as_whole, cut)
