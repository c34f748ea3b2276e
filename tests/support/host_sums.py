"""Sums of gradients in host memory, over a device that has no room for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from superoffload import AdamW
from superoffload.engine.bucket import Shard
from superoffload.engine.engine import Engine
from superoffload.optimizer.packed_gradient import packed_in
from tests.support.fake_cuda import FakeDevice
from tests.support.micro_batches import loop, losses_of

FP32: dict[str, Any] = {"accumulate_dtype": "fp32"}
BF16 = torch.bfloat16


@contextmanager
def free_bytes(nbytes: int) -> Iterator[list[str]]:
    """On the device; yields the shards of which something was added in host memory."""
    names: list[str] = []
    add = Engine.add

    def counted(engine: Engine, shard: Shard, addend: Tensor, **options: Any) -> None:
        assert not shard.resident, "its packed gradient is on the device"
        names.append(shard.name)
        add(engine, shard, addend, **options)

    with mock.patch.object(FakeDevice, "free_bytes", lambda _: nbytes), mock.patch.object(Engine, "add", counted):
        yield names


def uneven(model: nn.Module, optimizer: AdamW) -> None:
    for number, count in enumerate((3, 1, 5, 2, 2)):
        optimizer.zero_grad()
        optimizer.max_grad_norm = 0.05 if number == 3 else 100.0
        loop(optimizer, losses_of(model, number, count))
        optimizer.step()


def bytes_in_use(grad: Tensor | None) -> int:
    packed = packed_in(grad)
    tensors = [grad] if packed is None else [packed.in_memory, packed.addend]
    return sum(one.numel() * one.element_size() for one in tensors if one is not None)
