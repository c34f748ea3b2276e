"""Draws the plots of a run folder if matplotlib is installed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from superoffload.tools.report import style
from superoffload.tools.train.record import BUCKET_FATES, StepRecord
from superoffload.tools.train.run_digests import STATE_PARTS

if TYPE_CHECKING:
    from superoffload.tools.train.verification import ComparedStep

PLOT_HINT = "matplotlib is not installed, so no plot was drawn: pip install 'superoffload[demo]'"


def matplotlib_installed() -> bool:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def plot_training(
    records: Sequence[StepRecord], held_out_before: float | None, max_grad_norm: float | None, path: Path
) -> None:
    """Draws loss, gradient norm with clips, and the optimizer's time: hidden behind backward, and exposed."""
    with _figure(path, (3.2, 2.4, 2.4)) as (loss, norm, overlap):
        _draw_loss(loss, records, held_out_before)
        _draw_norm(norm, records, max_grad_norm)
        _draw_overlap(overlap, records)


def plot_verification(steps: Sequence[ComparedStep], path: Path) -> None:
    """Draws loss and events, the fates of the speculated buckets, and which digests were equal, step by step."""
    records = [step.speculative for step in steps]
    with _figure(path, (2.6, 2.8, 2.0)) as (loss, fates, digests):
        _draw_event_loss(loss, records)
        _draw_fates(fates, records)
        _draw_digests(digests, steps)


@contextmanager
def _figure(path: Path, heights: Sequence[float]) -> Iterator[Any]:
    """Yields axes above each other over the same steps; saves them to `path` when the block ends."""
    with style.drawing(path, 9.5, sum(heights) + 0.6) as figure:
        axes = figure.subplots(len(heights), 1, sharex=True, height_ratios=list(heights))
        yield axes
        axes[-1].set_xlabel("step")
        axes[-1].xaxis.get_major_locator().set_params(integer=True)


def _draw_loss(axes: Any, records: Sequence[StepRecord], held_out_before: float | None) -> None:
    steps = [record.step for record in records]
    losses = [record.loss for record in records]
    axes.plot(steps, losses, color=style.PALE_BLUE, linewidth=0.8, label="training, each step")
    axes.plot(steps, smooth(losses), color=style.BLUE, linewidth=1.6, label="training, smoothed")
    evaluations = [(0, held_out_before), *((record.step, record.held_out_loss) for record in records)]
    points = [(step, loss) for step, loss in evaluations if loss is not None and math.isfinite(loss)]
    if points:
        axes.plot(*zip(*points, strict=True), "o", color=style.ORANGE, markersize=5, label="held-out")
    axes.set_title("Loss (nats per byte)")
    axes.legend(loc="upper right")


def _draw_norm(axes: Any, records: Sequence[StepRecord], max_grad_norm: float | None) -> None:
    known = [(r.step, r.grad_norm) for r in records if r.grad_norm is not None and math.isfinite(r.grad_norm)]
    if known:
        axes.plot(*zip(*known, strict=True), color=style.PALE_BLUE, linewidth=0.9, label="gradient norm")
    clipped = [(r.step, r.grad_norm) for r in records if r.clipped]
    if clipped:
        share = f"clipped ({len(clipped)} of {len(records)} steps)"
        axes.plot(*zip(*clipped, strict=True), ".", color=style.RED, markersize=4, label=share)
    if max_grad_norm is not None:
        axes.axhline(max_grad_norm, color=style.MUTED, linewidth=0.9, linestyle="--", label="max_grad_norm")
    _mark_skipped(axes, records)
    axes.set_yscale("log")
    axes.set_title("Gradient norm")
    axes.legend(loc="upper right", ncols=4)


def _mark_skipped(axes: Any, records: Iterable[StepRecord]) -> None:
    skipped = [record.step for record in records if record.found_inf]
    for index, step in enumerate(skipped):
        axes.axvline(step, color=style.ORANGE, linewidth=1.0, label="NaN or Inf: skipped" if index == 0 else None)


def _draw_overlap(axes: Any, records: Sequence[StepRecord]) -> None:
    steps = [record.step for record in records]
    hidden = smooth([1e3 * record.hidden_seconds for record in records])
    exposed = smooth([1e3 * record.exposed_seconds for record in records])
    axes.stackplot(
        steps, exposed, hidden, colors=(style.ORANGE, style.PALE_BLUE), labels=("exposed", "hidden behind backward")
    )
    axes.set_title("Optimizer time per step (ms, smoothed)")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right", ncols=2)


def _draw_event_loss(axes: Any, records: Sequence[StepRecord]) -> None:
    steps = [record.step for record in records]
    axes.plot(steps, [record.loss for record in records], "o-", color=style.BLUE, markersize=3, linewidth=1.3)
    for record in records:
        if record.events:
            axes.axvline(record.step, color=style.GRID, linewidth=5, zorder=0)
            label = "\n".join(event_label(text) for text in record.events)
            axes.annotate(
                label,
                (record.step, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(0, -3),
                textcoords="offset points",
                ha="center",
                va="top",
                fontsize=7.5,
                rotation=90,
                color=style.RED,
            )
    axes.set_title("Loss (nats per byte) and injected events")
    axes.margins(y=0.25)


def _draw_fates(axes: Any, records: Sequence[StepRecord]) -> None:
    steps = [record.step for record in records]
    bottom = [0.0] * len(records)
    for fate in BUCKET_FATES:
        counts = [record.counters[f"buckets_{fate}"] for record in records]
        axes.bar(steps, counts, 0.8, bottom, color=style.FATE_COLOURS[fate], label=f"{fate} ({int(sum(counts))})")
        bottom = [low + count for low, count in zip(bottom, counts, strict=True)]
    axes.set_title("What became of the speculated buckets")
    axes.set_ylabel("buckets")
    axes.set_ylim(top=max([1.0, *bottom]) * 1.28)
    axes.legend(loc="upper left", ncols=len(BUCKET_FATES))


def _draw_digests(axes: Any, steps: Sequence[ComparedStep]) -> None:
    parts = ("gradients", *STATE_PARTS)
    for row, part in enumerate(reversed(parts)):
        equal = [getattr(s.speculative_digests, part) == getattr(s.synchronous_digests, part) for s in steps]
        colours = [style.GREEN if same else style.RED for same in equal]
        axes.scatter([s.step for s in steps], [row] * len(steps), c=colours, marker="s", s=34, linewidths=0)
    axes.set_yticks(range(len(parts)), reversed(parts))
    axes.set_ylim(-0.7, len(parts) - 0.3)
    axes.set_title("SHA-256 of both runs: green equal, red different")
    axes.grid(False)


def event_label(text: str) -> str:
    """Returns an event without its steps: `clip@8-9:0.5x:late` becomes `clip 0.5x late`."""
    kind, _, rest = text.partition("@")
    return " ".join([kind, *rest.split(":")[1:]])


def smooth(values: Sequence[float], width: int = 21) -> list[float]:
    """Returns the median around each value; the window shrinks towards the ends, so nothing lags or is invented."""
    result = []
    for index in range(len(values)):
        reach = min(width // 2, index, len(values) - 1 - index)
        window = [value for value in values[index - reach : index + reach + 1] if math.isfinite(value)]
        result.append(median(window) if window else math.nan)
    return result
