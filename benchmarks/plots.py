"""Provides what benchmarks need to draw plots, where matplotlib is installed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from statistics import median

PLOT_HINT = "matplotlib is not installed, so no plot was drawn: pip install 'superoffload[demo]'"


def matplotlib_installed() -> bool:
    return find_spec("matplotlib") is not None


def smooth(values: Sequence[float], width: int = 21) -> list[float]:
    """Returns the median around each value; the window shrinks towards the ends, so nothing lags or is invented."""
    result = []
    for index in range(len(values)):
        reach = min(width // 2, index, len(values) - 1 - index)
        window = [value for value in values[index - reach : index + reach + 1] if math.isfinite(value)]
        result.append(median(window) if window else math.nan)
    return result
