"""One training program over the host link and over the fake driver, and models of many buckets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from superoffload import AdamW
from tests.support.adamw_training import batch, model_of
from tests.support.fake_cuda import Fake, on_fake_device

Train = Callable[[nn.Module, AdamW], None]
Outcome = tuple[dict[str, str], dict[str, float | int]]
LATE = 1500  # microseconds: up to so much later than enqueued; a step of these models takes about as long


def steps(model: nn.Module, optimizer: AdamW, seeds: range = range(6), scale: float = 1.0) -> None:
    for seed in seeds:
        optimizer.zero_grad()
        batch(model, seed, scale).backward()
        optimizer.step()


def run_on_host(train: Train, dtype: torch.dtype = torch.float32, **options: Any) -> Outcome:
    return run_model(train, dtype, options, lambda: None)


def run_on_fake(
    fake: Fake, train: Train, dtype: torch.dtype = torch.float32, *, link: dict[str, Any] | None = None, **options: Any
) -> Outcome:
    with on_fake_device(fake, **(link or {})):
        return run_model(train, dtype, options, fake.synchronize)


def deep_model(dtype: torch.dtype) -> nn.Sequential:
    """Of a dozen buckets, more than there are staging slots."""
    torch.manual_seed(0)
    layers = [layer for _ in range(10) for layer in (nn.Linear(32, 32), nn.Tanh())]
    return nn.Sequential(nn.Linear(16, 32), *layers, nn.Linear(32, 4)).to(dtype)


def wide_model(dtype: torch.dtype) -> nn.Sequential:
    """Each of its larger gradients spans four buckets."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 16), nn.Linear(16, 4)).to(dtype)


def run_model(
    train: Train,
    dtype: torch.dtype,
    options: dict[str, Any],
    synchronize: Callable[[], None],
    make_model: Callable[[torch.dtype], nn.Module] = model_of,
) -> Outcome:
    model = make_model(dtype)
    model.register_forward_pre_hook(lambda *_: synchronize())  # a forward reads parameters behind the current stream
    options = {"speculation": "always", "threads": 2, "bucket_numel": 1024, **options}
    with AdamW(model.parameters(), **options) as optimizer:
        train(model, optimizer)
        synchronize()
        return optimizer.state_digests(), optimizer.stats()


STEPS = 4


def two_branches() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(24, 24), nn.Linear(24, 24)])


def train(model: Any, synchronize: Any) -> dict[str, str]:
    """Both branches' gradients are in one bucket."""
    with AdamW(model.parameters(), speculation="always", bucket_numel=100_000, threads=1) as optimizer:
        for step in range(STEPS):
            optimizer.zero_grad()
            values = torch.randn(8, 24, generator=torch.Generator().manual_seed(step))
            sum(branch(values).square().mean() for branch in model).backward()
            optimizer.step()
            synchronize()
        return optimizer.state_digests()
