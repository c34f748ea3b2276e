"""Writes the printed table, and draws it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.jobs import DONE
from benchmarks.plots import PLOT_HINT, matplotlib_installed

Row = Mapping[str, Any]
_GIB = 2**30


def measured(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Returns (settings, result) of the training runs that have times."""
    runs = [row for row in rows if row["settings"].get("what") == "published" and row["status"] == DONE]
    return [(row["settings"]["run"], row["result"]) for row in runs if "tokens_per_second" in row["result"]]


def cells(row: Row) -> list[str]:
    """Returns a run's ranks, hidden, engine, tokens/s, seconds per step, GPU peak and average, host peak, loss."""
    run = row["settings"]["run"]
    names = [str(run["ranks"]), str(run["model"]["hidden"]), run["engine"]]
    result = row.get("result") or {}
    if "tokens_per_second" not in result:
        why = "out of memory" if "out_of_memory" in result else row.get("error", row["status"])
        return [*names, why, "", "", "", "", ""]
    sizes = [_gib(result[name]) for name in ("gpu_peak_bytes", "gpu_average_bytes", "host_peak_bytes")]
    speed = [f"{result['tokens_per_second']:,.0f}", f"{result['seconds_per_step']:.4f}"]
    loss = result["losses"][-1]
    return [*names, *speed, *sizes, "-" if loss is None else f"{loss:.4f}"]


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / _GIB:.2f}"


HEADER = ("ranks", "hidden", "engine", "tokens/s", "s/step", "GPU GiB", "average", "host GiB", "loss")


def text(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if row["settings"].get("what") != "published":
            yield f"{row['key']:<32}{row['status']}" + (f": {row['error']}" if "error" in row else "")
    yield "{:>5} {:>6} {:<16}{:>12}{:>9}{:>9}{:>9}{:>9}{:>9}".format(*HEADER)
    for row in rows:
        if row["settings"].get("what") == "published":
            values = cells(row)
            if not values[-1]:
                yield f"{values[0]:>5} {values[1]:>6} {values[2]:<16}  {values[3]}"
            else:
                yield "{:>5} {:>6} {:<16}{:>12}{:>9}{:>9}{:>9}{:>9}{:>9}".format(*values)


def draw(rows: Sequence[Row], path: Path) -> list[str]:
    """Draws throughput, memory and loss; returns the lines to print: the path, or why there is no picture."""
    runs = measured(rows)
    if not runs:
        return []
    if not matplotlib_installed():
        return [PLOT_HINT]
    from benchmarks.gh200.plots import plot_published

    plot_published(runs, path)
    return [str(path)]
