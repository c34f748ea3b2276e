"""Draws the losses of all runs of one comparison, and how far each is from the reference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import style
from tests.convergence.compare import Tolerance

_COLOURS = (style.BLUE, style.ORANGE, style.GREEN, style.RED)
_REFERENCE: dict[str, Any] = {"color": style.INK, "linewidth": 1.2, "linestyle": (0, (1, 1.5)), "zorder": 4}


def plot_curves(curves: Mapping[str, Sequence[float]], tolerance: Tolerance, path: Path, title: str = "") -> None:
    """Plots smoothed losses, and each curve's distance from the reference's runs with the allowed distance.

    Names are that of the reference or end in speculative, synchronous or "plain ..."; the part before is the group.
    """
    with style.drawing(path, 9.5, 6.6) as figure:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
        groups: dict[str, str] = {}
        for name, losses in curves.items():
            steps = range(1, len(losses) + 1)
            looks = _REFERENCE if name == tolerance.of else _looks(name, groups)
            above.plot(steps, smooth(losses, 9), label=name, **looks)
            distance = [abs(loss - centre) for loss, centre in zip(losses, tolerance.losses, strict=False)]
            below.plot(steps[: len(distance)], distance, **{**looks, "linewidth": 0.6 * looks["linewidth"]})
        allowed = tolerance.allowed_losses()
        below.plot(range(1, len(allowed) + 1), allowed, color=style.INK, linewidth=0.9)
        below.fill_between(range(1, len(allowed) + 1), allowed, color=style.GRID, zorder=0)
        above.set_title("Loss (nats per byte), running median" + (f": {title}" if title else ""))
        above.legend(loc="upper right")
        below.set_title(f"Distance from the mean of six runs of {tolerance.of} in every step; grey: what is allowed")
        below.set_yscale("log")
        below.set_ylim(bottom=1e-5)
        below.set_xlabel("step")


def _looks(name: str, groups: dict[str, str]) -> dict[str, Any]:
    """Returns a colour per group; the synchronous line is wide and pale, as an equal speculative run covers it."""
    group, _, kind = name.rpartition("ranks, ")
    colour = groups.setdefault(group, _COLOURS[len(groups) % len(_COLOURS)])
    if kind.startswith("plain"):
        return {"color": colour, "linewidth": 1.1, "linestyle": (0, (5, 2)), "zorder": 2}
    if kind == "synchronous":
        return {"color": colour, "linewidth": 5.0, "alpha": 0.3, "zorder": 1}
    return {"color": colour, "linewidth": 1.4, "zorder": 3}


def smooth(values: Sequence[float], width: int) -> list[float]:
    """Returns the median around each value; the window shrinks towards the ends, so nothing lags or is invented."""
    result = []
    for index in range(len(values)):
        reach = min(width // 2, index, len(values) - 1 - index)
        window = [value for value in values[index - reach : index + reach + 1] if math.isfinite(value)]
        result.append(median(window) if window else math.nan)
    return result
