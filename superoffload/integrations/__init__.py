"""Adapters translate the events of host frameworks into calls of the optimizer and the engine.

Each adapter is loaded when first used, since it needs its framework.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from superoffload.integrations import deepspeed, fsdp2, transformers

_MODULES = ("deepspeed", "fsdp2", "transformers")

__all__ = ["deepspeed", "fsdp2", "transformers"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'superoffload.integrations' has no attribute {name!r}")
    return import_module(f"superoffload.integrations.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
