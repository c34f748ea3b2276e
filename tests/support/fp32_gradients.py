"""Gradients that bf16 and fp16 cannot hold, and the ways in which they come to an optimizer in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW
from tests.support.adamw_training import batch, model_of

Source = Callable[[nn.Module], None]

needs_grad_dtype = pytest.mark.skipif(
    not hasattr(torch.Tensor, "grad_dtype"), reason="p.grad_dtype needs torch 2.10 or newer"
)


class Precise(torch.autograd.Function):
    """A parameter in its own dtype whose gradient is computed in fp32."""

    @staticmethod
    def forward(ctx: Any, param: Tensor) -> Tensor:
        return param.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].float() * 1.0001234


class Fused(torch.autograd.Function):
    """Likewise, as a fused kernel does it: added to main_grad by its address, which raises no version; what it returns
    has no meaning."""

    @staticmethod
    def forward(ctx: Any, param: Tensor) -> Tensor:
        ctx.param = param
        return param.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor | None:
        param = ctx.param
        param.main_grad.data.add_(grads[0].float() * 1.0001234)
        if not hasattr(param, "grad_added_to_main_grad"):
            return None
        param.grad_added_to_main_grad = True
        return torch.full_like(param, torch.nan)


def precise_loss(model: nn.Module, seed: int) -> Tensor:
    """Of a random batch."""
    ways = {name: getattr(param, "way", Precise).apply(param) for name, param in model.named_parameters()}
    return batch(model, seed, call=lambda x: torch.func.functional_call(model, ways, (x,)))


def parameters_of(model: nn.Module) -> list[Any]:
    """With whatever attributes others have given them."""
    return list(model.parameters())


def as_it_is(_: nn.Module) -> None:
    """The model as it is."""


def _declares(dtype: torch.dtype | None) -> Source:
    def declare(model: nn.Module) -> None:
        for param in parameters_of(model):
            param.grad_dtype = dtype

    return declare


declared, of_any_dtype = _declares(torch.float32), _declares(None)


def with_main_grad(param: Any) -> None:
    param.main_grad = torch.zeros_like(param, dtype=torch.float32)


def add_to_main_grad(param: Any) -> None:
    param.main_grad.add_(param.grad)
    param.grad = None


def by_hooks(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad_dtype = torch.float32
        with_main_grad(param)
        param.register_post_accumulate_grad_hook(add_to_main_grad)


def by_kernels(model: nn.Module) -> None:
    for param in parameters_of(model):
        with_main_grad(param)
        param.way = Fused
        param.grad_added_to_main_grad = False


def by_silent_kernels(model: nn.Module) -> None:
    """They return no gradient at all."""
    by_kernels(model)
    for param in parameters_of(model):
        del param.grad_added_to_main_grad


def by_each(model: nn.Module) -> None:
    """One way after the other, and some gradients in the parameter's dtype."""
    sources = [declared, of_any_dtype, by_hooks, by_kernels, by_silent_kernels]
    for i, param in enumerate(model.parameters()):
        sources[i % len(sources)](nn.ParameterList([param]))


SOURCES: dict[str, Source] = {
    "grad_dtype": declared,
    "any": of_any_dtype,
    "hooks": by_hooks,
    "kernels": by_kernels,
    "silent_kernels": by_silent_kernels,
    "each": by_each,
}


def trained(source: Source, code: Callable[[nn.Module, Any], None], dtype: torch.dtype, **options: Any) -> AdamW:
    """A closed optimizer behind ``code``."""
    model = model_of(dtype)
    source(model)
    given = {"lr": 1e-2, "threads": 2, "bucket_numel": 1024, **options}
    with AdamW(model.parameters(), **given) as optimizer:
        code(model, optimizer)
    return optimizer


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range = range(4)) -> None:
    for seed in seeds:
        optimizer.zero_grad()
        precise_loss(model, seed).backward()
        optimizer.step()


def gradient_of(param: Tensor) -> Tensor:
    found = getattr(param, "main_grad", param.grad)
    assert isinstance(found, Tensor)
    return found


# ---- micro-batches of a step -----------------------------------------------------------------------------------------


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
