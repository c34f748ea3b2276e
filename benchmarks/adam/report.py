"""Writes the readable table, the targets and the plot of `python -m benchmarks.adam`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import style
from benchmarks.adam import contestants as who

Row = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """Compares a ratio with its aim; `at_most` 0: `at_least` counts. `note` puts the value into perspective."""

    text: str
    value: float
    at_most: float = 0.0
    at_least: float = 0.0
    note: str = ""

    @property
    def met(self) -> bool:
        return self.value <= self.at_most if self.at_most else self.value >= self.at_least


# Times as multiples of the plain step of the same instruction set, all cores.
_RATIOS = {
    "avx512": {"journaled": 1.10, "undo": 1.10, "replay": 1.20, "publish": 0.62},
    "avx2": {"journaled": 1.25, "undo": 1.25, "replay": 1.35},
}


def all_of(rows: Sequence[Row], **wanted: Any) -> Iterator[Row]:
    """Yields the rows with these values."""
    return (row for row in rows if all(row[key] == value for key, value in wanted.items()))


def find(rows: Sequence[Row], **wanted: Any) -> Row | None:
    """Returns the first of them, or None."""
    return next(all_of(rows, **wanted), None)


def targets(report: dict[str, Any]) -> list[Target]:
    """Returns every target that this machine's rows can be compared with."""
    rows = report["rows"]
    most = max(row["threads"] for row in rows)
    numel = report["settings"]["numel"]
    return [*_own_targets(rows, most, numel), *_peer_targets(rows, most, numel)]


def _own_targets(rows: Sequence[Row], most: int, numel: int) -> Iterator[Target]:
    for isa, ratios in _RATIOS.items():
        step = find(rows, name="step", isa=isa, threads=most, numel=numel)
        if step is None:
            continue
        yield Target(f"{isa}: plain step, part of the memory limit", step["of_limit"], at_least=0.95)
        for name, bound in ratios.items():
            row = find(rows, name=name, isa=isa, threads=most, numel=numel)
            if row is not None:
                note = _bare_walk(rows, name, isa, most, numel)
                yield Target(f"{isa}: {name}, times the plain step", row["ratio"], at_most=bound, note=note)


def _bare_walk(rows: Sequence[Row], name: str, isa: str, most: int, numel: int) -> str:
    """Says what memory alone would make of the operation: its walk as a multiple of the same plain step. Rows without
    an instruction set are multiples of the best one's step, so only that one has a note."""
    row = find(rows, name=who.limit_name(who.READING if name == "publish" else name), threads=most, numel=numel)
    if row is None or row["ratio_to"] != f"step {isa}":
        return ""
    walk = "reading what it reads, and nothing else," if name == "publish" else "a walk over its bytes alone"
    return f"{walk} takes {row['ratio']:.2f} here"


def _peer_targets(rows: Sequence[Row], most: int, numel: int) -> Iterator[Target]:
    for name in (who.TORCH_JOB, who.DEEPSPEED_JOB):
        row = find(rows, name=name, threads=most, numel=numel)
        if row is not None:
            yield Target(f"{name}, times our step", row["ratio"], at_least=1.4)
    singles = [find(rows, name=name, threads=1, numel=numel) for name in (who.TORCH_STEP, who.DEEPSPEED_STEP)]
    best = min((row["ratio"] for row in singles if row is not None), default=None)
    if best is not None:
        yield Target("one core: best peer's bare fp32 step, times our step", best, at_least=1 / 1.1)


def table(rows: Sequence[Row]) -> str:
    """Returns one line per row, for a terminal."""
    lines = [
        f"{'':36} {'isa':7} {'threads':>7} {'elements':>12} {'median ms':>10} {'min ms':>9} {'GB/s':>6} "
        f"{'of limit':>8} {'x step':>7}"
    ]
    for row in rows:
        of_limit = "" if row["of_limit"] is None else f"{row['of_limit']:.2f}"
        lines.append(
            f"{row['name']:36} {row['isa']:7} {row['threads']:>7} {row['numel']:>12,} "
            f"{row['seconds_median'] * 1e3:>10.3f} {row['seconds_min'] * 1e3:>9.3f} "
            f"{row['gb_per_s']:>6.1f} {of_limit:>8} {row['ratio']:>7.2f}"
        )
    return "\n".join(lines)


def targets_table(report: dict[str, Any]) -> str:
    """Returns one line per target."""
    lines = []
    for target in targets(report):
        bound = f"<= {target.at_most:.2f}" if target.at_most else f">= {target.at_least:.2f}"
        note = f"; {target.note}" if target.note else ""
        lines.append(f"{'met   ' if target.met else 'MISSED'} {target.text}: {target.value:.2f} ({bound}){note}")
    return "\n".join(lines)


def plot(report: dict[str, Any], path: Path) -> None:
    """Draws operations against their limits, and how the time of a step grows with size and threads."""
    with style.drawing(path, 9.5, 7.6) as figure:
        grid = figure.add_gridspec(2, 2)
        bars, sizes, threads = (figure.add_subplot(place) for place in (grid[0, :], grid[1, 0], grid[1, 1]))
        _draw_operations(bars, report)
        _draw_sizes(sizes, report)
        _draw_threads(threads, report)


def _draw_operations(axes: Any, report: dict[str, Any]) -> None:
    from matplotlib.patches import Patch

    rows, settings = report["rows"], report["settings"]
    most, numel = max(row["threads"] for row in rows), settings["numel"]
    names = [*who.OPERATIONS, who.TORCH_JOB, who.DEEPSPEED_JOB]
    names = [name for name in names if find(rows, name=name, threads=most, numel=numel)]
    isas = [isa for isa in settings["isas"] if isa != "scalar"] or settings["isas"]
    width = 0.8 / (len(isas) + 1)
    colours = dict(zip(isas, (style.PALE_BLUE, style.BLUE, style.GREEN), strict=False))
    for place, name in enumerate(names):
        limit = find(rows, name=who.limit_name(name), threads=most, numel=numel)
        found = [find(rows, name=name, isa=isa, threads=most, numel=numel) for isa in isas]
        bars = [(limit, style.GRID), *((row, colours[isa]) for row, isa in zip(found, isas, strict=True))]
        if not any(found):  # a peer: one bar, in the middle
            bars = [(None, ""), (find(rows, name=name, threads=most, numel=numel), style.ORANGE)]
        for index, (row, colour) in enumerate(bars):
            if row is not None:
                axes.bar(place + index * width, row["seconds_median"] * 1e3, width, color=colour)
    labels = [name.replace(", ", ",\n").replace("CPUAdam", "") for name in names]  # short, as they stand side by side
    axes.set_xticks([place + width for place in range(len(names))], labels)
    axes.set_title(f"Milliseconds for {numel / 1e6:.0f} M parameters, {most} threads")
    legend = [("memory limit", style.GRID), *colours.items(), ("peer", style.ORANGE)]
    axes.legend(handles=[Patch(color=colour, label=label) for label, colour in legend], ncols=len(legend))
    axes.grid(axis="x", visible=False)


def _draw_sizes(axes: Any, report: dict[str, Any]) -> None:
    most = max(row["threads"] for row in report["rows"])
    _draw_lines(axes, report, "numel", lambda row: 1e9 * row["seconds_median"] / row["numel"], threads=most)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("elements")
    axes.set_title(f"Nanoseconds per parameter, {most} threads, {report['settings']['isas'][-1]}")


def _draw_threads(axes: Any, report: dict[str, Any]) -> None:
    rows, numel = report["rows"], report["settings"]["numel"]
    _draw_lines(axes, report, "threads", lambda row: float(row["gb_per_s"]), numel=numel)
    axes.set_xlabel("threads")
    axes.set_xticks(sorted({row["threads"] for row in rows}))
    axes.set_ylim(bottom=0)
    axes.set_title(f"GB/s, {numel / 1e6:.0f} M parameters, {report['settings']['isas'][-1]}")


def _draw_lines(axes: Any, report: dict[str, Any], x: str, y: Callable[[Row], float], **fixed: int) -> None:
    """Draws the steps of the best instruction set and their limit, among rows with the values ``fixed``."""
    best = report["settings"]["isas"][-1]
    for name, isa, colour in (
        ("limit of step", "", style.MUTED),
        ("step", best, style.BLUE),
        ("journaled", best, style.ORANGE),
    ):
        points = sorted((row[x], y(row)) for row in all_of(report["rows"], name=name, isa=isa, **fixed))
        axes.plot(*zip(*points, strict=True), "o-", color=colour, markersize=4, linewidth=1.4, label=name)
    axes.legend()
