"""Bookkeeping that torch.compile goes round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """torch.compile goes round it, as round the bookkeeping of torch's own optimizers."""
    result: _Function = getattr(torch, "_disable_dynamo", lambda same: same)(function)
    return result
