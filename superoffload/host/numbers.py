"""Checks numbers that users pass; every message says what was expected."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from torch import Tensor

from superoffload.errors import ArgumentError


def check_number(name: str, value: Any, *, low: float, high: float = math.inf, below: bool = False) -> float:
    """Returns ``value`` as a finite float within [low, high], or [low, high) with ``below``."""
    number = as_float(value)
    if not math.isfinite(number) or number < low or number > high or (below and number == high):
        upper = "" if high == math.inf else f" and {'below' if below else 'at most'} {high:g}"
        raise ArgumentError(f"{name}={value!r}: expected a finite number of at least {low:g}{upper}")
    return number


def as_float(value: Any) -> float:
    """Converts ``value``, a real number or a tensor of one element, to a float; NaN if it is anything else."""
    if type(value) is float:  # at once: optimizers of one small parameter come here in every step
        return value
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def check_whole_number(name: str, value: Any) -> None:
    """Accepts None (for a default) or an int of at least 1."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ArgumentError(f"{name}={value!r}: expected a whole number of at least 1, or None")


MOST_THREADS = 1024  # each takes memory and a place in the scheduler's queue; far more than a node has cores


def check_threads(name: str, value: Any) -> None:
    """Accepts None (for one per core) or a number of threads that a machine can have."""
    check_whole_number(name, value)
    if value is not None and value > MOST_THREADS:
        raise ArgumentError(
            f"{name}={value!r}: expected at most {MOST_THREADS}, or None for one per processor core; more are no faster"
        )
