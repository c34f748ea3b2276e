"""Draws throughput, memory and loss of the published setting in one picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import style
from benchmarks.plots import smooth

Result = Mapping[str, Any]
_COLOURS = (style.BLUE, style.GREEN, style.ORANGE, style.RED, "#8e5ea2")
_DASHES = {1: "-", 2: "--", 4: ":", 3: "-."}
_GIB = 2**30


def plot_published(results: Sequence[tuple[Result, Result]], path: Path) -> None:
    """Draws (settings, result) pairs of the runs that have times."""
    engines = list(dict.fromkeys(settings["engine"] for settings, _ in results))
    colours = dict(zip(engines, _COLOURS, strict=False))
    with style.drawing(path, 13, 8) as figure:
        (speed, gpu), (host, loss) = figure.subplots(2, 2)
        _draw_lines(speed, results, colours, "tokens_per_second", 1.0)
        speed.set_title("Tokens per second, all GPUs")
        _draw_lines(gpu, results, colours, "gpu_peak_bytes", _GIB, average="gpu_average_bytes")
        gpu.set_title("GPU memory (GiB): peak, and average (thin)")
        _draw_lines(host, results, colours, "host_peak_bytes", _GIB, average="host_average_bytes")
        host.set_title("Host memory of all ranks (GiB): peak, and average (thin)")
        _draw_losses(loss, results, colours)
        handles, labels = speed.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper")


def _draw_lines(
    axes: Any,
    results: Sequence[tuple[Result, Result]],
    colours: Mapping[str, str],
    name: str,
    unit: float,
    average: str | None = None,
) -> None:
    """Draws values over the hidden size, one line per engine and number of ranks."""
    for (engine, ranks), points in _grouped(results).items():
        known = [(hidden, result) for hidden, result in points if result.get(name) is not None]
        if not known:
            continue
        hidden = [size for size, _ in known]
        dash, colour = _DASHES.get(ranks, "-"), colours[engine]
        label = f"{engine}, {ranks} rank{'s' if ranks > 1 else ''}"
        axes.plot(hidden, [result[name] / unit for _, result in known], "o" + dash, color=colour, label=label)
        if average is not None:
            values = [result[average] / unit for _, result in known]
            axes.plot(hidden, values, dash, color=colour, linewidth=0.7)
    if not axes.lines:
        axes.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axes.transAxes, color=style.MUTED)
        axes.set_axis_off()
    axes.set_xlabel("hidden size")
    axes.set_xticks(sorted({settings["model"]["hidden"] for settings, _ in results}))
    axes.set_ylim(bottom=0)


def _grouped(results: Sequence[tuple[Result, Result]]) -> dict[tuple[str, int], list[tuple[int, Result]]]:
    groups: dict[tuple[str, int], list[tuple[int, Result]]] = {}
    for settings, result in results:
        groups.setdefault((settings["engine"], settings["ranks"]), []).append((settings["model"]["hidden"], result))
    return {key: sorted(points, key=lambda point: point[0]) for key, points in groups.items()}


def _draw_losses(axes: Any, results: Sequence[tuple[Result, Result]], colours: Mapping[str, str]) -> None:
    """Draws losses of the smallest model, which all can train."""
    smallest = min(settings["model"]["hidden"] for settings, _ in results)
    for settings, result in results:
        if settings["model"]["hidden"] == smallest:
            losses = [math.nan if loss is None else loss for loss in result["losses"]]
            dash = _DASHES.get(settings["ranks"], "-")
            steps = range(1, len(losses) + 1)
            axes.plot(steps, smooth(losses), dash, color=colours[settings["engine"]], linewidth=1.2)
    axes.set_xlabel("step")
    axes.set_title(f"Loss, hidden size {smallest} (mean over ranks, smoothed)")
