"""Refuses manual clipping under ZeRO-3: gradients are not in ``p.grad`` there, so it would clip nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.utils import clip_grad

from superoffload.errors import StateError

_MARK = "superoffload_steps_it"  # marks parameters whose gradients our backend takes away during backward


def replacements() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Lists (module, name, replacement) for torch's public names and for what clip_grad_norm_ itself calls."""
    import torch.nn.utils

    found = []
    for module in (torch.nn.utils, clip_grad):
        for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "_clip_grads_with_norm_"):
            if hasattr(module, name):
                found.append((module, name, _refusing(getattr(module, name), name.strip("_") + "_")))
    return found


def _refusing(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if any(hasattr(param, _MARK) and param.grad is None for param in params):
            raise StateError(
                f"{name}: under DeepSpeed ZeRO-3 gradients are not in p.grad, so this would clip nothing; set "
                '"gradient_clipping" in the DeepSpeed JSON (Accelerate: accelerator.clip_grad_norm_)'
            )
        return original(params, *args, **kwargs)

    return clip
