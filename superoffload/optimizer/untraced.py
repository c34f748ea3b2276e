"""torch.compile does not trace our bookkeeping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """Keeps torch.compile from tracing ``function``, as torch does for its own optimizers."""
    result: _Function = getattr(torch, "_disable_dynamo", lambda same: same)(function)
    return result
