"""Plots of `superoffload bench journal` and `bench state`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from superoffload.tools.plan.explanations import JOURNAL_USED_BYTES
from superoffload.tools.report import style
from superoffload.tools.report.plots import smooth

_COLOURS = (style.BLUE, style.GREEN, style.ORANGE, style.RED, style.MUTED, style.INK)


@contextmanager
def _axes(path: Path) -> Iterator[Any]:
    with style.drawing(path, 11, 3.8) as figure:
        axes = figure.subplots()
        yield axes
        axes.set_xlabel("step")
        axes.figure.legend(loc="outside right upper")


def plot_journal(report: dict[str, Any], path: Path) -> None:
    """Bytes per parameter over the steps, one line per spike factor."""
    with _axes(path) as axes:
        for row, colour in zip(report["rows"], _COLOURS, strict=False):
            sizes = [math.nan if size is None else size for size in row["bytes_per_param"]]  # a gap: nothing speculated
            axes.plot(range(1, len(sizes) + 1), sizes, ".-", ms=2.5, color=colour, linewidth=1, label=row["name"])
        expected = JOURNAL_USED_BYTES[1]
        label = f"{expected}: the higher mean that a plan expects"
        axes.axhline(expected, color=style.INK, linestyle=":", linewidth=1, label=label)
        axes.set_ylim(bottom=0)
        axes.set_title("Journal, bytes per parameter of the speculated buckets")


def plot_state(report: dict[str, Any], path: Path) -> None:
    """Training loss of every run, smoothed."""
    with _axes(path) as axes:
        for row in report["rows"]:
            colour = style.BLUE if row["state_dtype"] == "fp32" else style.ORANGE
            label = f"{row['state_dtype']} moments" if row["seed"] == report["rows"][0]["seed"] else None
            axes.plot(range(1, len(row["losses"]) + 1), smooth(row["losses"]), color=colour, linewidth=1, label=label)
        axes.set_title("Training loss (nats per byte), smoothed, a line per seed")
