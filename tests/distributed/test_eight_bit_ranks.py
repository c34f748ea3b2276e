"""8-bit moments among ranks, and the noise of rounded ones: that of one process, however parameters lie over ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

from superoffload import AdamW
from superoffload.host.tensors import local_of
from tests.support.rank_processes import flat_mesh, loss_of, mesh_of, net, on_ranks, optimizer_of, shard
from tests.support.reference import adam, eight_bit
from tests.support.reference.stochastic import noise
from tests.support.split_masters import same_bits, shard_of

EIGHT: dict[str, Any] = {"state_dtype": "8bit"}
WIDTH = 67  # shards of some hundred elements, that are no multiples of a block of codes


def wide_net(seed: int = 0) -> Any:
    return net(torch.bfloat16, seed=seed, width=WIDTH)


def stepped(model: nn.Module, optimizer: AdamW, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def differences_from_the_reference() -> list[str]:
    """Steps each rank's shards by the reference; the noise counts elements of the whole parameter."""
    model = shard(wide_net(), flat_mesh())
    wrong = []
    with optimizer_of(model, max_grad_norm=None, seed=3, lr=1e-2, **EIGHT) as optimizer:
        params = [p for p in model.parameters() if p.requires_grad]
        shards = [shard_of(optimizer, p) for p in params]
        masters = [s.read_masters().numpy().copy() for s in shards]
        moments = [[np.zeros(eight_bit.stored_size(s.numel), np.uint8) for _ in range(2)] for s in shards]
        for step in range(1, 6):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.synchronize()
            for i, (param, one) in enumerate(zip(params, shards, strict=True)):
                assert param.grad is not None
                gradient = local_of(param.grad).reshape(-1).view(torch.uint16).numpy()
                random = noise(one.numel, one.noise_stream, step, one.offset)
                hyper = adam.Hyper(1e-2, 0.9, 0.999, 1e-8, 1e-2, step)
                first, second = moments[i]
                now = eight_bit.step(masters[i], first, second, gradient, "bf16", hyper, random)
                masters[i], moments[i] = now.master, [now.exp_avg, now.exp_avg_sq]
                same = np.array_equal(one.exp_avg.numpy(), now.exp_avg)
                same = same and np.array_equal(one.exp_avg_sq.numpy(), now.exp_avg_sq)
                same = same and np.array_equal(one.read_masters().numpy(), now.master)
                if not same:
                    wrong.append(f"{one.name}, step {step}")
        cut = [s for s in shards if s.numel % eight_bit.BLOCK and s.numel > eight_bit.BLOCK]
        return wrong if cut else ["no shard has a whole block and a part of one"]


def test_shards_are_stepped_as_the_reference_says() -> None:
    assert on_ranks(2, differences_from_the_reference) == [[], []]


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
