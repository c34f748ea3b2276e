"""Our bookkeeping is not traced by torch.compile, and makes ordinary tensors in every mode of the caller's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def outside_inference(function: _Function) -> _Function:
    """Leaves a caller's ``torch.inference_mode()``, in which state would be made that nothing may change later."""
    result: _Function = torch.inference_mode(mode=False)(function)
    return result


def untraced(function: _Function) -> _Function:
    """Keeps torch.compile from tracing ``function``, as torch does for its own optimizers."""
    result: _Function = getattr(torch, "_disable_dynamo", lambda same: same)(function)
    return result
