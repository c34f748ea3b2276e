"""A small model trained on a device in the ways that users train: checkpointed, compiled, in micro-batches.

Its gradients are those that the device computes, deterministically, so that runs on one device can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu_suite.devices import Device, open_device
from benchmarks.gpu_suite.races import deterministic
from superoffload import AdamW

STEPS = 5
_WIDTH = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(
            nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.parts(x)
        return found


class Small(nn.Module):
    """``reentrant``: its blocks' activations are computed again in backward, by torch's older or newer way."""

    def __init__(self, blocks: int, reentrant: bool | None) -> None:
        super().__init__()
        self.first = nn.Linear(16, _WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.last = nn.Linear(_WIDTH, 8)
        self._reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            if self._reentrant is None:
                x = block(x)
            else:
                recomputed: Any = checkpoint(block, x, use_reentrant=self._reentrant)
                x = recomputed
        found: Tensor = self.last(x)
        return found


@dataclass(frozen=True)
class Way:
    reentrant: bool | None = None  # None: no checkpointing
    compiled: bool = False
    micro_batches: int = 1
    blocks: int = 4


@dataclass
class Outcome:
    """What a run left behind; ``results`` are compared to the bit."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    digests: list[dict[str, str]] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def results(self) -> tuple[list[float], list[float], list[dict[str, str]]]:
        return self.losses, self.norms, self.digests


def runs(device_name: str, way: Way, options: Sequence[Mapping[str, Any]]) -> list[Outcome]:
    """One model, and one run from its first parameters for every optimizer with these options.

    One, because what is compiled twice may not be compiled alike.
    """
    device = open_device(device_name)
    with deterministic(), device.links():
        torch.manual_seed(0)
        model = Small(way.blocks, way.reentrant).to(device=device.torch, dtype=torch.bfloat16)
        first = {name: value.clone() for name, value in model.state_dict().items()}
        forward: Any = torch.compile(model) if way.compiled else model
        found = []
        for one in options:
            model.load_state_dict(first)
            found.append(_run(device, model, forward, way, one))
            device.synchronize()
        return found


def _run(device: Device, model: nn.Module, forward: Any, way: Way, options: Mapping[str, Any]) -> Outcome:
    found = Outcome()
    given: dict[str, Any] = {"lr": 3e-3, "threads": 2, "bucket_numel": 4096, **options}
    if given.get("delivery") == "on_demand":
        given["module"] = model
    with AdamW(model.parameters(), **given) as optimizer:
        if not way.compiled:  # what the compiler traces waits for nothing
            device.prepare(model)
        for step in range(STEPS):
            optimizer.max_grad_norm = 1e-2 if step % 2 else 1e6
            if way.compiled:
                device.catch_up()
            for part in range(way.micro_batches - 1):
                with optimizer.accumulate():
                    _backward(device, forward, 100 * step + part)
            found.losses.append(_backward(device, forward, 100 * step + 99))
            optimizer.step()
            found.norms.append(optimizer.grad_norm)
            optimizer.zero_grad()
            if given.get("delivery") != "on_demand" or step == STEPS - 1:  # a digest waits for all deliveries
                optimizer.synchronize()
                device.catch_up()
                found.digests.append(optimizer.state_digests())
        found.stats = optimizer.stats()
    return found


def _backward(device: Device, forward: Any, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = (torch.randn(32, size, generator=generator).to(device.torch) for size in (16, 8))
    loss = (forward(inputs.bfloat16()).float() - targets).square().mean()
    loss.backward()
    return float(loss.detach())


# Without a GPU: over the stand-in for the driver. A GPU shows the rest: its allocator, its streams, its kernels.
DEVICES = ("stand-in", pytest.param("cuda", marks=pytest.mark.gpu))
devices = pytest.mark.parametrize("device", DEVICES)
