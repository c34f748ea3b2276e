"""Defines colours and figure settings shared by plots and page, so that a bucket fate looks the same in both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

INK = "#1d2733"
MUTED = "#667585"
GRID = "#e3e8ee"
BLUE = "#2563a8"
PALE_BLUE = "#a9c6e6"
ORANGE = "#d9772b"
GREEN = "#2f8f5b"
RED = "#c0392b"
PURPLE = "#7b4fa3"

FATE_COLOURS = {
    "committed": "#2f8f5b",
    "undone": "#8e5ea2",
    "replayed": "#2563a8",
    "skipped": "#d9772b",
    "abandoned": "#8a949e",
    "stepped": "#4f9fb5",  # after the verdict, without speculation
    "stepped two-phase": "#b5a14f",
}

MATPLOTLIB: dict[Any, Any] = {
    "figure.facecolor": "white",
    "figure.dpi": 144,
    "font.size": 9.5,
    "axes.edgecolor": "#b8c2cc",
    "axes.labelcolor": INK,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "axes.axisbelow": True,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.solid_capstyle": "round",
}


@contextmanager
def drawing(path: Path, width: float, height: float, **saved_with: Any) -> Iterator[Any]:
    """Yields a matplotlib figure in this style and saves it to ``path`` when the block ends."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(MATPLOTLIB):
        # Without pyplot there is no global state and no search for a display.
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        figure.savefig(path, **saved_with)
