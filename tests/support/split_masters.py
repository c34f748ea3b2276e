"""What split masters must hold, worked out on whole numbers, beside the engine's own functions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from superoffload import AdamW
from superoffload.engine.bucket import Shard
from superoffload.host.tensors import is_dtensor

SPLIT: dict[str, Any] = {"master_dtype": "split"}
# Bits of fp32 masters at a tie between two bf16 values, of which the upper halves are even and odd, of both signs; and
# beside ties, zeros, a denormal number.
TIES = (0x3F808000, 0x3F818000, 0xBF808000, 0xBF818000)
ODD_BITS = (*TIES, 0x3F807FFF, 0x3F808001, 0x3F80FFFF, 0x3F810000, 0x00000000, 0x80000000, 0x00008000, 0x80000001)


def masters_of(bits: Iterable[int], numel: int) -> Tensor:
    """These bits over and over as fp32."""
    whole = torch.tensor(list(bits), dtype=torch.int64)
    return (whole - (whole >> 31 << 32)).to(torch.int32).repeat(-(-numel // len(whole)))[:numel].view(torch.float32)


def bits_of(tensor: Tensor) -> Tensor:
    """As numbers without a sign."""
    word, mask = (torch.int32, 0xFFFFFFFF) if tensor.dtype is torch.float32 else (torch.int16, 0xFFFF)
    return tensor.detach().contiguous().view(word).to(torch.int64) & mask


def away(masters: Tensor) -> Tensor:
    """fp32 rounded to bf16, to nearest, ties away from zero."""
    upper = bits_of(masters) + 0x8000 >> 16 & 0xFFFF
    return (upper - (upper >> 15 << 16)).to(torch.int16).view(torch.bfloat16)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype is other.dtype and torch.equal(bits_of(one), bits_of(other))


def shard_of(optimizer: AdamW, param: Tensor) -> Shard:
    tracked = optimizer.parts.params.get(param)
    assert tracked is not None
    return tracked.shard


def joined(shard: Shard) -> Tensor:
    """Bits of the masters, from the halves."""
    assert shard.upper is not None and shard.master.dtype is torch.int16
    return (bits_of(torch.cat(shard.upper.parts)) << 16) + shard.master.to(torch.int64) & 0xFFFFFFFF


def assert_split(optimizer: AdamW) -> None:
    """bf16 parameters are the upper halves of their masters; the state shows these in fp32. Others have whole ones."""
    for param, state in optimizer.state.items():
        shard, holding = shard_of(optimizer, param), optimizer.parts.params.holding_of(param)
        spread = holding.kind == "spread"  # then the state is that of this rank's part alone
        master = state["master"] if spread else holding.part(state["master"])
        assert master.dtype is torch.float32 and (spread or state["master"].shape == param.shape)
        if param.dtype is not torch.bfloat16:
            assert shard.upper is None and shard.master.dtype is torch.float32
            continue
        assert torch.equal(joined(shard), bits_of(master)), shard.name
        assert same_bits(holding.part(param.detach()), away(master)), shard.name


def state_of(optimizer: AdamW) -> list[dict[str, Tensor]]:
    """Copies, parameter by parameter."""
    return [{name: value.clone() for name, value in values.items()} for values in optimizer.state.values()]


def same_states(ones: list[dict[str, Tensor]], others: list[dict[str, Tensor]]) -> bool:
    return all(
        set(one) == set(other) and all(same_bits(one[name], other[name]) for name in one)
        for one, other in zip(ones, others, strict=True)
    )


def tied(optimizer: AdamW, model: Any) -> list[Tensor]:
    """Gives the model's parameters values at ties, rounded to even as by torch, and loads the masters; returns them."""
    masters = []
    for param in model.parameters():
        if not param.requires_grad:
            continue
        master = masters_of(ODD_BITS, param.numel()).view(param.shape)
        with torch.no_grad():
            if is_dtensor(param):
                holding = optimizer.parts.params.holding_of(param)
                holding.part(param).copy_(holding.part_of_whole(master))
            else:
                param.copy_(master)
        masters.append(master)
    optimizer.load_masters(masters)
    return masters
