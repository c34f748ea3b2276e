"""Draws loss, throughput, exposed optimizer time and memory of several runs in one picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from superoffload.tools.report import style
from superoffload.tools.report.plots import smooth
from superoffload.tools.report.recorded_runs import Run

_COLOURS = (style.BLUE, style.ORANGE, style.GREEN, style.RED, "#8e5ea2", "#4f9fb5", style.MUTED, style.INK)


def plot_comparison(runs: Sequence[Run], path: Path) -> None:
    with style.drawing(path, 9.5, 6.6) as figure:
        figure.set_layout_engine("constrained", h_pad=0.1)
        (loss, rate), (exposed, memory) = figure.subplots(2, 2)
        for index, run in enumerate(runs):
            colour = _COLOURS[index % len(_COLOURS)]
            steps = run.column("step")
            loss.plot(steps, run.column("loss"), color=colour, linewidth=0.6, alpha=0.3)
            loss.plot(steps, smooth(run.column("loss")), color=colour, label=_label(run))
            tokens = [
                count / seconds if seconds > 0 else math.nan
                for count, seconds in zip(run.column("tokens"), run.column("seconds"), strict=True)
            ]
            rate.plot(steps, smooth(tokens), color=colour)
            exposed.plot(steps, [100 * share for share in smooth(run.exposed_share)], color=colour)
        _draw_memory(memory, runs)
        for axes, title in (
            (loss, "Training loss (nats per byte)"),
            (rate, "Tokens per second (smoothed)"),
            (exposed, "Optimizer time exposed (% of the step, smoothed)"),
        ):
            axes.set_title(title)
            axes.set_xlabel("step")
        rate.set_ylim(bottom=0)
        exposed.set_ylim(bottom=0)
        loss.legend(loc="upper right")


def _label(run: Run) -> str:
    """Returns the name with dollar signs escaped, which would begin a formula."""
    return run.name.replace("$", r"\$")


def _draw_memory(axes: Any, runs: Sequence[Run]) -> None:
    known = [(run.summary or {}).get("peak_host_memory_bytes") for run in runs]
    sizes = [0.0 if size is None else size / 2**20 for size in known]
    colours = [_COLOURS[index % len(_COLOURS)] for index in range(len(runs))]
    bars = axes.barh(range(len(runs)), sizes, color=colours)
    axes.bar_label(bars, [f"{size:,.0f}" if size else "not known" for size in sizes], padding=3, fontsize=8)
    axes.set_yticks(range(len(runs)), [_label(run) for run in runs])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, 1.18 * max([*sizes, 1.0]))
    axes.set_title("Host memory at its peak (MiB)")
