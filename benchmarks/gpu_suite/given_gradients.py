"""Trains with given gradients, bit for bit, so that runs on any device can be compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu_suite.devices import open_device
from superoffload import AdamW

NUMELS = (3 * 1024 + 17, 33, 4096, 5, 2048 + 1, 1)
STEPS = 9
NAN_STEP, ACCUMULATED_STEP, LR_STEP = 4, 6, 7
LINK_FACTS = ("uses_flag", "pinned", "pinned_bytes", "residency")


class Weighted(nn.Module):
    """Has one parameter whose gradient is the given weight: the loss is their product, summed."""

    def __init__(self, numel: int, seed: int) -> None:
        super().__init__()
        values = 0.1 * torch.randn(numel, generator=torch.Generator().manual_seed(seed))
        self.weight = nn.Parameter(values)

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight.float() * gradient.float()).sum()


class Model(nn.Module):
    """Reads several of them in order."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Weighted(numel, seed) for seed, numel in enumerate(NUMELS))
        self.to(device=device, dtype=dtype)

    def forward(self, gradients: list[Tensor]) -> Tensor:
        parts = [part(gradient) for part, gradient in zip(self.parts, gradients, strict=True)]
        return torch.stack(parts).sum()


def gradients_of(step: int, dtype: torch.dtype, device: str, *, poisoned: bool = False) -> list[Tensor]:
    """Returns the gradients of a step, representable in ``dtype``, so that they arrive as they are."""
    generator = torch.Generator().manual_seed(1000 + step)
    found = [(0.01 * torch.randn(numel, generator=generator)).to(dtype) for numel in NUMELS]
    if poisoned:
        found[2][7] = math.nan
    return [gradient.to(device) for gradient in found]


@dataclass
class Run:
    """Records a run, step by step; ``losses`` show what forward read and are compared on one device only."""

    digests: list[dict[str, str]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    link: dict[str, Any] = field(default_factory=dict)

    def bits(self) -> tuple[list[dict[str, str]], list[float]]:
        return self.digests, self.norms


def make(device: str, dtype: torch.dtype, **options: Any) -> tuple[Model, Any]:
    """Returns a model and its optimizer, with several buckets and two worker threads."""
    model = Model(dtype, device)
    if options.get("delivery") == "on_demand":
        options["module"] = model
    optimizer = AdamW(
        model.parameters(), lr=1e-2, **{"bucket_numel": 2048, "threads": 2, "max_grad_norm": 1e6, **options}
    )
    return model, optimizer


def backward(model: Model, step: int, *, poisoned: bool = False) -> Tensor:
    param = next(model.parameters())
    loss: Tensor = model(gradients_of(step, param.dtype, str(param.device), poisoned=poisoned))
    loss.backward()
    return loss.detach()


def train(
    device_name: str,
    dtype: torch.dtype,
    *,
    before_step: Callable[[Any, Any], None] | None = None,
    waits: bool = True,
    link: Mapping[str, Any] | None = None,
    **options: Any,
) -> Run:
    """Trains with clips at every second step, a NaN, two micro-batches and another learning rate.

    ``waits``: digests the state after every step; else only after the last. ``link``: fields of CudaOptions.
    """
    device = open_device(device_name)
    run = Run()
    with device.links(**(link or {})):
        model, optimizer = make(str(device.torch), dtype, **options)
        device.prepare(model)
        try:
            for step in range(STEPS):
                optimizer.max_grad_norm = 0.05 if step % 2 else 1e6
                if step == LR_STEP:
                    optimizer.param_groups[0]["lr"] = 3e-3
                if step == ACCUMULATED_STEP:
                    with optimizer.accumulate():
                        backward(model, 100 + step)
                run.losses.append(float(backward(model, step, poisoned=step == NAN_STEP)))
                if before_step is not None:
                    before_step(model, optimizer)
                optimizer.step()
                run.norms.append(optimizer.grad_norm)
                optimizer.zero_grad()
                if waits:
                    device.catch_up()
                    run.digests.append(optimizer.state_digests())
            optimizer.synchronize()
            device.catch_up()
            if not waits:
                run.digests.append(optimizer.state_digests())
            run.parameters = [param.detach().cpu().clone() for param in model.parameters()]
            run.stats = optimizer.stats()
            run.link = {name: getattr(optimizer._engine.link, name, None) for name in LINK_FACTS}
        finally:
            optimizer.close()
    return run
