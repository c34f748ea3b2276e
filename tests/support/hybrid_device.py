"""Megatron's ``HybridDeviceOptimizer`` on a machine without a GPU: parameters that say they are on one, and no streams.

Needs megatron-core. Every copy is done when it is asked for, as if each stream were waited for at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn


class DeviceParameter(nn.Parameter):
    """Lies in host memory and says that it does not. What is made from it is a plain tensor."""

    is_cuda = True


class _Stream:
    """Stands for a stream and for the events that it records: nothing is to be waited for."""

    def __getattr__(self, name: str) -> Callable[..., _Stream]:
        return lambda *_: self


@contextmanager
def without_streams() -> Iterator[None]:
    """Replaces what the class calls of ``torch.cuda``, and pinning."""
    with (
        mock.patch("torch.cuda.current_stream", _Stream),
        mock.patch("torch.cuda.Stream", _Stream),
        mock.patch("torch.cuda.stream", lambda stream: nullcontext()),
        mock.patch.object(Tensor, "pin_memory", lambda self: self),
    ):
        yield


def megatron(name: str) -> Any:
    """Imports a module of Megatron without its warnings that Apex and Transformer Engine are missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module(name)


def parameters(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, seed: int = 0) -> list[DeviceParameter]:
    generator = torch.Generator().manual_seed(seed)
    return [DeviceParameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def set_gradients(params: Sequence[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def hybrid(cpu_class: type, params: Any, **options: Any) -> Any:
    """Makes the optimizer with the arguments of ``get_megatron_optimizer``, and what ``options`` changes of them."""
    arguments: dict[str, Any] = {
        "offload_fraction": 1.0, "cpu_optimizer_cls": cpu_class, "gpu_optimizer_cls": torch.optim.AdamW,
        "overlap_cpu_optimizer_d2h_h2d": True, "pin_cpu_grads": False, "pin_cpu_params": False,
        "param_update_in_fp32": True, "lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8,
        "bias_correction": True, "fused": True,
    }  # fmt: skip
    module = megatron("megatron.core.optimizer.cpu_offloading.hybrid_optimizer")
    return module.HybridDeviceOptimizer(params, **{**arguments, **options})
