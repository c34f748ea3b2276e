"""Presents `python -m benchmarks.schedule` as tables and a plot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import style

Row = dict[str, Any]

_COLUMNS = (
    ("another system, synchronous", True, "synchronous*"),
    ("another system, in backward", False, "in backward*"),
    ("speculate", False, "speculate"),
    ("adaptive", False, "adaptive"),
    ("one pass", True, "one pass"),
    ("two-phase", True, "two-phase"),
    ("adaptive", True, "adaptive"),
)
_COLOURS = {
    "another system, synchronous": style.MUTED,
    "another system, in backward": style.ORANGE,
    "speculate": style.PALE_BLUE,
    "one pass": style.RED,
    "two-phase": "#b5a14f",
    "adaptive": style.BLUE,
    "synchronous": style.MUTED,
}


def _part(rows: Sequence[Row], part: str) -> list[Row]:
    return [row for row in rows if row["part"] == part]


def tables(report: dict[str, Any]) -> str:
    """Returns all tables, for the terminal."""
    drawn = (
        ("model", _model_table),
        ("delivery", _delivery_table),
        ("trace", _trace_table),
        ("micro-batches", _micro_batch_table),
        ("wall clock", _wall_table),
    )
    found = ((table, _part(report["rows"], part)) for part, table in drawn)
    return "\n\n".join(table(rows) for table, rows in found if rows)


def _model_table(rows: Sequence[Row]) -> str:
    lines = [
        "Iteration time over the bound, in virtual time (* other systems, by arithmetic: not run)",
        f"{'':>12}{'':>26}  {'never clips':^22}  {'clips at every step':^33}",
        f"{'tokens/step':>12}"
        + "".join(f"{title:>13}" for *_, title in _COLUMNS[:2])
        + "  "
        + "".join(f"{title:>11}" for *_, title in _COLUMNS[2:]),
    ]
    for tokens in dict.fromkeys(row["tokens"] for row in rows):
        found = {(row["contestant"], row["clips"]): row["ratio"] for row in rows if row["tokens"] == tokens}
        cells = [found[name, clips] for name, clips, _ in _COLUMNS]
        lines.append(
            f"{tokens:>12}"
            + "".join(f"{ratio:>13.2f}" for ratio in cells[:2])
            + "  "
            + "".join(f"{ratio:>11.3f}" for ratio in cells[2:])
        )
    return "\n".join(lines)


def _micro_batch_table(rows: Sequence[Row]) -> str:
    names = list(dict.fromkeys(row["contestant"] for row in rows))
    lines = [
        "Iteration time over the bound, in virtual time, with the figures of an H200: never clips, clips at every step",
        f"{'tokens/step':>12}{'micro-batches':>15}" + "".join(f"{name:>16}" for name in names),
    ]
    for tokens, count in dict.fromkeys((row["tokens"], row["micro_batches"]) for row in rows):
        here = [row for row in rows if (row["tokens"], row["micro_batches"]) == (tokens, count)]
        ratios = {(row["contestant"], row["clips"]): row["ratio"] for row in here}
        cells = (f"{ratios[name, False]:.2f}, {ratios[name, True]:.2f}" for name in names)
        lines.append(f"{tokens:>12}{count:>15}" + "".join(f"{cell:>16}" for cell in cells))
    return "\n".join(lines)


def _delivery_table(rows: Sequence[Row]) -> str:
    names = list(dict.fromkeys(row["contestant"] for row in rows))
    lines = [
        "Iteration time over the bound, in virtual time, by when new parameters travel; never clips, always speculates",
        f"{'':22}{'tokens/step':>12}" + "".join(f"{name:>28}" for name in names),
    ]
    for machine, tokens in dict.fromkeys((row["machine"], row["tokens"]) for row in rows):
        of = {row["contestant"]: row["ratio"] for row in rows if (row["machine"], row["tokens"]) == (machine, tokens)}
        lines.append(f"{machine:22}{tokens:>12}" + "".join(f"{of[name]:>28.3f}" for name in names))
    return "\n".join(lines)


def _trace_table(rows: Sequence[Row]) -> str:
    tokens = list(dict.fromkeys(row["tokens"] for row in rows))
    lines = [
        "Adaptive over the best fixed choice, after the first 20 steps, by tokens per step",
        f"{'verdicts':24}" + "".join(f"{count:>10}" for count in tokens),
    ]
    for trace in dict.fromkeys(row["trace"] for row in rows):
        ratios = {row["tokens"]: row["ratio"] for row in rows if row["trace"] == trace}
        lines.append(f"{trace:24}" + "".join(f"{ratios[count]:>10.3f}" for count in tokens))
    return "\n".join(lines)


def _wall_table(rows: Sequence[Row]) -> str:
    lines = [
        "On this machine: layers and copies slept, the processors at real work",
        f"{'':16}{'never clips':>28}{'clips at every step':>28}",
        f"{'':16}{'ms':>10}{'over bound':>18}{'ms':>10}{'over bound':>18}",
    ]
    for name in dict.fromkeys(row["contestant"] for row in rows):
        cells = sorted((row for row in rows if row["contestant"] == name), key=lambda row: bool(row["clips"]))
        lines.append(
            f"{name:16}" + "".join(f"{1e3 * row['seconds_median']:>10.1f}{row['of_bound']:>18.2f}" for row in cells)
        )
    return "\n".join(lines)


def plot(report: dict[str, Any], path: Path) -> None:
    """Plots the model's table as lines, the traces, and this machine as bars; omits what was not measured."""
    parts = ("model", "delivery", "trace", "wall clock")
    model, deliveries, traces, wall = (_part(report["rows"], part) for part in parts)
    draws: list[Callable[[Any], None]] = []
    if model:
        draws += [lambda axes: _draw_model(axes, model, False), lambda axes: _draw_model(axes, model, True)]
    if traces:
        draws.append(lambda axes: _draw_traces(axes, traces))
    if deliveries:
        draws.append(lambda axes: _draw_deliveries(axes, deliveries))
    if wall:
        draws.append(lambda axes: _draw_wall(axes, wall))
    columns = 2 if len(draws) > 1 else 1
    lines = -(-len(draws) // columns)
    with style.drawing(path, 5.5 * columns, 3.6 * lines) as figure:
        grid = figure.subplots(lines, columns, squeeze=False).flatten()
        for axes, draw in zip(grid, draws, strict=False):
            draw(axes)
        for axes in grid[len(draws) :]:
            axes.set_axis_off()


def _draw_model(axes: Any, rows: Sequence[Row], clips: bool) -> None:
    names = [name for name, of_clips, _ in _COLUMNS if of_clips is clips]
    tokens = list(dict.fromkeys(row["tokens"] for row in rows))
    for name in names:
        ratios = {row["tokens"]: row["ratio"] for row in rows if row["contestant"] == name and row["clips"] is clips}
        adaptive = name == "adaptive"
        line = {"linewidth": 2.2, "linestyle": "-", "zorder": 3} if adaptive else {"linewidth": 1.3, "linestyle": "--"}
        axes.plot(tokens, [ratios[count] for count in tokens], "o", ms=3.5, color=_COLOURS[name], label=name, **line)
    axes.axhline(1.0, color=style.INK, linewidth=0.8)
    axes.set_xticks(tokens, [f"{count / 1024:g} k" for count in tokens])
    axes.set_xlabel("tokens per step")
    axes.set_ylim(bottom=0.9)
    verdict = "clips at every step" if clips else "never clips"
    axes.set_title(f"Step over the bound: {verdict}")
    axes.legend()


def _draw_traces(axes: Any, rows: Sequence[Row]) -> None:
    tokens = list(dict.fromkeys(row["tokens"] for row in rows))
    traces = list(dict.fromkeys(row["trace"] for row in rows))
    shades = (style.PALE_BLUE, style.BLUE, style.GREEN, style.ORANGE, style.MUTED)
    for number, (count, colour) in enumerate(zip(tokens, shades, strict=False)):
        ratios = {row["trace"]: row["ratio"] for row in rows if row["tokens"] == count}
        places = [index + (number - (len(tokens) - 1) / 2) * 0.16 for index in range(len(traces))]
        axes.barh(places, [ratios[trace] - 1 for trace in traces], 0.15, left=1, color=colour, label=str(count))
    axes.axvline(1.0, color=style.INK, linewidth=0.8)
    axes.axvline(1.03, color=style.RED, linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(traces)), traces)
    axes.invert_yaxis()
    axes.set_xlim(right=1.04)
    axes.set_title("Adaptive over the best fixed choice (dotted: 3 % slower)")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), title="tokens per step")


def _draw_deliveries(axes: Any, rows: Sequence[Row]) -> None:
    machine = rows[-1]["machine"]  # with the slowest link
    shown = [row for row in rows if row["machine"] == machine]
    tokens = list(dict.fromkeys(row["tokens"] for row in shown))
    for name, colour in zip(
        dict.fromkeys(row["contestant"] for row in shown), (style.RED, style.BLUE, style.GREEN), strict=True
    ):
        ratios = [row["ratio"] for row in shown if row["contestant"] == name]
        axes.plot(tokens, ratios, "o--" if name == "on demand" else "o-", ms=3.5, color=colour, label=name)
    axes.axhline(1.0, color=style.INK, linewidth=0.8)
    axes.set_xticks(tokens, [f"{count / 1024:g} k" for count in tokens])
    axes.set_xlabel("tokens per step")
    axes.set_ylim(bottom=0.9)
    axes.set_title(f"When parameters travel, {machine}")
    axes.legend()


def _draw_wall(axes: Any, rows: Sequence[Row]) -> None:
    names = list(dict.fromkeys(row["contestant"] for row in rows))
    for offset, clips in ((-0.2, False), (0.2, True)):
        values = {row["contestant"]: row["of_bound"] for row in rows if row["clips"] is clips}
        places = [index + offset for index in range(len(names))]
        colour, label = (style.RED, "clips at every step") if clips else (style.GREEN, "never clips")
        bars = axes.bar(places, [values[name] for name in names], 0.36, color=colour, label=label)
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.axhline(1.0, color=style.INK, linewidth=0.8)
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.set_title("Step over the bound, on this machine")
    axes.legend(loc="upper right")
    axes.set_ylim(0, max(row["of_bound"] for row in rows) * 1.25)
