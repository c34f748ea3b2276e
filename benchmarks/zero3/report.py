"""Presents `python -m benchmarks.zero3` as rows, readable lines and a plot."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import style
from benchmarks.zero3.steps import EAGER, LATER, STOCK, UPSTREAM, Workload

FASTER_OPTIMIZER = 1.4

Row = dict[str, Any]
Turns = Sequence[Sequence[float]]


def holds(rows: Iterable[Row]) -> bool:
    """Returns whether ours is no slower than stock in any row, and its optimizer part faster by the promised factor."""
    ours = [row for row in rows if row["name"] in (EAGER, LATER)]
    return all(row["ratio"] <= 1.0 and row["optimizer_ratio"] * FASTER_OPTIMIZER <= 1.0 for row in ours)


def rows_of(workload: Workload, ranks: int, results: Sequence[dict[str, Any]]) -> list[Row]:
    """Returns one row per contestant, from the first rank's measurements; memory is that of all ranks."""
    stock = results[0][STOCK]
    return [_row(workload, name, ranks, stock, [result[name] for result in results]) for name in workload.contestants]


def _row(workload: Workload, name: str, ranks: int, stock: dict[str, Any], found: Sequence[dict[str, Any]]) -> Row:
    mine = found[0]
    return {
        "name": name,
        "ranks": ranks,
        "clip": workload.clip or None,
        "precision": workload.precision,
        "isa": mine["isa"],
        "threads": mine["threads"],
        "numel": mine["numel"],
        "tokens": workload.tokens,
        **_times("seconds", mine["steps"]),
        **_times("optimizer_seconds", mine["parts"]),
        "host_bytes": sum(result["host_bytes"] for result in found),
        "gpu_bytes": None if mine["gpu_bytes"] is None else sum(result["gpu_bytes"] for result in found),
        "loss": mine["loss"],
        "clip_rate": mine["clip_rate"],
        "bytes_per_param": None,
        "gb_per_s": None,
        "of_limit": None,
        "ratio_to": STOCK,
        "ratio": _ratio(mine["steps"], stock["steps"]),
        "optimizer_ratio": _ratio(mine["parts"], stock["parts"]),
    }


def _times(name: str, turns: Turns) -> Row:
    every = [seconds for turn in turns for seconds in turn]
    return {f"{name}_median": statistics.median(every), f"{name}_min": min(every)}


def _ratio(mine: Turns, theirs: Turns) -> float:
    """Compares turns taken side by side, so that a machine that becomes slower or faster affects both."""
    pairs = zip(mine, theirs, strict=True)
    return statistics.median(statistics.median(ours) / statistics.median(stock) for ours, stock in pairs)


def clip_text(row: Row) -> str:
    return "no clipping" if row["clip"] is None else f"clip {row['clip']:g}"


def line(row: Row) -> str:
    on_gpu = "" if row["gpu_bytes"] is None else f"  GPU {row['gpu_bytes'] / 2**20:6.0f} MiB"
    return (
        f"{row['ranks']} ranks, {clip_text(row):12} {row['name']:24} step {1e3 * row['seconds_median']:7.1f} ms "
        f"(x {row['ratio']:.2f})  optimizer {1e3 * row['optimizer_seconds_median']:7.1f} ms "
        f"(x {row['optimizer_ratio']:.2f})  host {row['host_bytes'] / 2**20:6.0f} MiB{on_gpu}  loss {row['loss']:.4f}"
    )


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draws each row's step as a bar, with the optimizer part dark at its foot."""
    colours = {STOCK: style.ORANGE, EAGER: style.BLUE, LATER: style.GREEN, UPSTREAM: style.MUTED}
    places = list(dict.fromkeys((row["ranks"], clip_text(row)) for row in rows))
    with style.drawing(path, 9.0, 4.2) as figure:
        axes = figure.add_subplot()
        for index, (name, colour) in enumerate(colours.items()):
            mine = [row for row in rows if row["name"] == name]
            if not mine:
                continue
            x = [places.index((row["ranks"], clip_text(row))) + 0.22 * (index - 1) for row in mine]
            axes.bar(x, [1e3 * row["seconds_median"] for row in mine], 0.2, color=colour, alpha=0.35)
            parts = [1e3 * row["optimizer_seconds_median"] for row in mine]
            axes.bar(x, parts, 0.2, color=colour, label=name)
        axes.set_xticks(range(len(places)), [f"{ranks} ranks,\n{clip}" for ranks, clip in places])
        axes.set_title("Milliseconds per step; dark: the optimizer's part of it")
        axes.grid(axis="x", visible=False)
        axes.legend()
