"""Writes the readable table, the aims and the plot of `python -m benchmarks.tensors`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import style
from benchmarks.tensors.steps import AUTOGRAD, FUSED, KERNELS, ON_DEMAND, OURS, PHASES

Row = dict[str, Any]

_AIMED_AT = 2000  # tensors
_COLOURS = {FUSED: style.MUTED, KERNELS: style.GREEN, OURS: style.BLUE, ON_DEMAND: style.ORANGE}
_PHASE_COLOURS = {
    "forward": style.ORANGE, "backward": style.BLUE, "step": style.PALE_BLUE, "zero_grad": style.MUTED,
}  # fmt: skip


@dataclass(frozen=True)
class Aim:
    """Limits a figure of one contestant. ``unit``: what its JSON value is divided by."""

    text: str
    contestant: str
    key: str
    at_most: float
    unit: float = 1.0

    def value(self, row: Row, clock: str = "") -> float | None:
        """Returns the figure. ``clock``: "" for elapsed time, else the beginning of the other one's key."""
        found = row[clock + self.key]
        return None if found is None else float(found) / self.unit


_PROCESSOR = "processor_"
AIMS = (
    Aim("AdamW, us per tensor beyond autograd", OURS, "seconds_per_tensor", 20.0, 1e-6),
    Aim("AdamW, times what torch fused adds", OURS, "ratio", 2.5),
    Aim("on demand, us per module beyond eager", ON_DEMAND, "seconds_per_module", 10.0, 1e-6),
)


def counts_of(rows: Sequence[Row]) -> list[int]:
    return sorted({row["tensors"] for row in rows})


def aimed_at(rows: Sequence[Row]) -> int:
    """Returns the number of tensors that the aims are about; the largest if that was not measured."""
    counts = counts_of(rows)
    return _AIMED_AT if _AIMED_AT in counts else counts[-1]


def find(rows: Sequence[Row], name: str, count: int) -> Row:
    return next(row for row in rows if row["name"] == name and row["tensors"] == count)


def table(rows: Sequence[Row]) -> str:
    """Returns one line per row, for a terminal."""
    header = (
        f"{'':24}{'milliseconds of':^44}{'us per tensor beyond autograd, of':^42}\n"
        f"{'tensors':>7} {'':16}"
        + "".join(f"{phase:>11}" for phase in PHASES)
        + "".join(f"{name:>10}" for name in PHASES[1:])
        + f"{'bwd+step':>12}{'x fused':>9}{'per module':>12}"
    )
    return "\n".join([header, *map(_line, rows)])


def _line(row: Row) -> str:
    text = f"{row['tensors']:>7,} {row['name']:16}"
    text += "".join(f"{1e3 * row['phases'][phase]:>11.3f}" for phase in PHASES)
    if row["name"] == AUTOGRAD:
        return text
    text += "".join(f"{1e6 * row['seconds_per_tensor_of'][phase]:>10.1f}" for phase in PHASES[1:])
    text += f"{1e6 * row['seconds_per_tensor']:>12.1f}"
    text += f"{'' if row['ratio'] is None else format(row['ratio'], '.2f'):>9}"
    return text + ("" if row["seconds_per_module"] is None else f"{1e6 * row['seconds_per_module']:>12.1f}")


def aims_table(rows: Sequence[Row]) -> str:
    """Returns two lines per aim, with its figure for each number of tensors, and how the cost per tensor grows with
    that. Elapsed time decides whether an aim is met."""
    lines = []
    for aim in AIMS:
        value = aim.value(find(rows, aim.contestant, aimed_at(rows)))
        met = value is not None and value <= aim.at_most
        lines.append(f"{'met   ' if met else 'MISSED'} {aim.text} (<= {aim.at_most:g}): {_by_count(aim, rows, '')}")
        lines.append(f"       in processor time: {_by_count(aim, rows, _PROCESSOR)}")
    return "\n".join([*lines, *_growth(rows)])


def _by_count(aim: Aim, rows: Sequence[Row], clock: str) -> str:
    values = {count: aim.value(find(rows, aim.contestant, count), clock) for count in counts_of(rows)}
    return ", ".join(f"{value:.1f} for {count:,}" for count, value in values.items() if value is not None) or "unknown"


def _growth(rows: Sequence[Row]) -> list[str]:
    """Returns a line about the cost per tensor with the most tensors; if it is linear, it equals that with fewer."""
    counts = counts_of(rows)
    first, last = aimed_at(rows), counts[-1]
    if first == last:
        first = counts[0]
    if first == last:
        return []
    shown = []
    for name in (OURS, KERNELS, FUSED):
        before, after = (find(rows, name, count)["seconds_per_tensor"] for count in (first, last))
        shown.append(f"{name} x {after / before:.2f}" if before > 0 else f"{name} unknown")
    return [f"cost per tensor with {last:,} tensors over that with {first:,}: {', '.join(shown)}"]


# ---- the plot ---------------------------------------------------------------------------------------------------


def plot(report: dict[str, Any], path: Path) -> None:
    """Draws the cost per tensor by the number of tensors, and its parts."""
    with style.drawing(path, 11, 4.2) as figure:
        growth, parts = figure.subplots(1, 2)
        _draw_growth(growth, report["rows"])
        _draw_parts(parts, report["rows"])


def _draw_growth(axes: Any, rows: Sequence[Row]) -> None:
    counts = counts_of(rows)
    for name in (FUSED, KERNELS, OURS):
        costs = [1e6 * find(rows, name, count)["seconds_per_tensor"] for count in counts]
        axes.plot(counts, costs, "o-", color=_COLOURS[name], markersize=4, linewidth=1.4, label=name)
    more = [1e6 * find(rows, ON_DEMAND, count)["seconds_per_module"] for count in counts]
    label = "on demand beyond eager, whole step"
    axes.plot(counts, more, "o--", color=_COLOURS[ON_DEMAND], markersize=4, linewidth=1.2, label=label)
    for aim, colour in ((AIMS[0], style.BLUE), (AIMS[2], style.ORANGE)):
        axes.axhline(aim.at_most, color=colour, linestyle=":", linewidth=1, label=f"aim: {aim.at_most:g}")
    axes.set_xscale("log")
    axes.set_xticks(counts, [f"{count:,}" for count in counts])
    axes.minorticks_off()
    axes.set_ylim(min(0.0, *more), 1.35 * axes.get_ylim()[1])  # room for the legend
    axes.set_xlabel("parameter tensors")
    axes.set_ylabel("microseconds, backward and step()")
    axes.set_title("Cost per tensor beyond autograd")
    axes.legend(loc="upper left", ncols=2)


def _draw_parts(axes: Any, rows: Sequence[Row]) -> None:
    """Draws what each phase takes beyond autograd as bars, without those that take no more."""
    count = aimed_at(rows)
    names = [ON_DEMAND, OURS, KERNELS, FUSED]  # from below
    ends = [0.0] * len(names)
    for phase in PHASES:
        of_phase = [1e6 * find(rows, name, count)["seconds_per_tensor_of"][phase] for name in names]
        widths = [max(0.0, cost) for cost in of_phase]
        axes.barh(names, widths, left=ends, color=_PHASE_COLOURS[phase], label=phase)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    axes.set_xlabel("microseconds per tensor")
    axes.set_title(f"What it consists of, {count:,} tensors")
    axes.grid(axis="y", visible=False)
    axes.legend()
