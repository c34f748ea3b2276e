"""Hooks must not keep the optimizer alive: parameters, modules and the engine have them, and often outlive it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import ParamSpec

_Arguments = ParamSpec("_Arguments")


def weakly(method: Callable[_Arguments, None]) -> Callable[_Arguments, None]:
    """Calls a bound method as long as its object lives, and does nothing afterwards."""
    reference = weakref.WeakMethod(method)

    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        alive = reference()
        if alive is not None:
            alive(*args, **kwargs)

    return call
