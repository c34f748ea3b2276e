"""Micro-batches of a step, the loops over them, and what torch gets where it adds their gradients in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW
from tests.support.adamw_training import batch

WINDOWS = (3, 1, 5, 2)  # micro-batches of each step
Window = Callable[[AdamW, Iterable[Tensor]], None]


def losses_of(model: nn.Module, window: int, count: int) -> Iterator[Tensor]:
    """One after the other, each when it is asked for."""
    for micro in range(count):
        yield batch(model, 10 * window + micro)


def loop(optimizer: AdamW, losses: Iterable[Tensor]) -> None:
    for loss in losses:
        loss.backward()


def told(optimizer: AdamW, losses: Iterable[Tensor]) -> None:
    *first, last = losses
    with optimizer.accumulate():
        for loss in first:
            loss.backward()
    last.backward()


def in_own_dtype(loss: Tensor, params: Sequence[Any], **options: Any) -> list[Tensor]:
    """Gradients as autograd makes them where nothing is said of their dtype."""
    for param in params:
        param.grad, param.grad_dtype = None, param.dtype
    found = list(torch.autograd.grad(loss, params, **options))
    for param, grad in zip(params, found, strict=True):
        assert grad.dtype is param.dtype
        param.grad_dtype = torch.float32
    return found


def summed(optimizer: AdamW, losses: Iterable[Tensor]) -> None:
    """The reference: torch adds such gradients in fp32."""
    params = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    sums = [torch.zeros_like(param, dtype=torch.float32) for param in params]
    for loss in losses:
        for total, grad in zip(sums, in_own_dtype(loss, params), strict=True):
            total.add_(grad.float())
    for param, total in zip(params, sums, strict=True):
        param.grad = total


def train_windows(window: Window, model: nn.Module, optimizer: Any) -> None:
    """With steps that clip, change the learning rate, or are skipped."""
    for number, count in enumerate((*WINDOWS, *WINDOWS)):
        optimizer.zero_grad()
        optimizer.max_grad_norm = 0.05 if number == 3 else 100.0
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + number)
        window(optimizer, losses_of(model, number, count))
        if number == 5:
            gradient = model.get_parameter("0.bias").grad
            assert gradient is not None
            gradient[0] = torch.inf
        optimizer.step()


def accelerated(model: nn.Module, optimizer: Any, micro_batches: int = 3) -> None:
    """Three windows of Accelerate, which says where they end."""
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate: pip install 'superoffload[transformers]'")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=micro_batches)
    prepared, wrapped = accelerator.prepare(model, optimizer)
    for seed in range(3 * micro_batches):
        with accelerator.accumulate(prepared):
            accelerator.backward(batch(model, seed))
            wrapped.step()
            wrapped.zero_grad()
    accelerate.state.GradientState._reset_state()
