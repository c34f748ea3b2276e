"""Measures the undo journal's size in real training: every step of the demo's model, also with spiking gradients.

A spike factor r means that every step was speculated with gradients r times those that were finally applied: the clip
is set to 1/r of the last norm after backward, when all buckets are speculated already.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import style
from benchmarks.state.accuracy import axes_over_steps
from benchmarks.training.config import TrainingConfig
from benchmarks.training.corpus import Corpus
from benchmarks.training.trainer import Trainer

# Means of a run without clips, and of one whose speculated gradients are 3 times the clipped (docs/benchmarks.md).
JOURNAL_USED_BYTES = (1.1, 1.25)
SETTLED_AFTER = 10  # steps; before, exp_avg_sq changes by its own size and fewer words fit their codes

_COLOURS = (style.BLUE, style.GREEN, style.ORANGE, style.RED, style.MUTED, style.INK)

Row = dict[str, Any]


def run_journal(
    config: TrainingConfig, corpus: Corpus, factors: Sequence[float], on_step: Callable[[str, int], None]
) -> list[Row]:
    """Returns one row per factor; 1 is training without clipping."""
    return [_run(config, corpus, factor, on_step) for factor in factors]


def _run(config: TrainingConfig, corpus: Corpus, factor: float, on_step: Callable[[str, int], None]) -> Row:
    name = "no clipping" if factor == 1 else f"gradients {factor:g} times the clipped ones"
    settings = config.replace(speculation="always", max_grad_norm=None)
    sizes: list[float | None] = []
    with Trainer(settings, corpus, None if factor == 1 else 1 / factor) as trainer:
        numel = sum(parameter.numel() for parameter in trainer.model.parameters())
        before = trainer.optimizer.stats()
        losses = []
        early = before  # stats() after step SETTLED_AFTER
        for step in range(1, config.steps + 1):
            losses.append(trainer.train_step().loss)
            now = trainer.optimizer.stats()
            speculated = now["buckets_speculated"] > before["buckets_speculated"]
            sizes.append(now["journal_bytes_per_param"] if speculated else None)
            before = now
            early = now if step <= SETTLED_AFTER else early
            on_step(name, step)
        stats = trainer.optimizer.stats()
    settled = [size for size in sizes[SETTLED_AFTER:] if size is not None]
    return {
        "name": name,
        "factor": factor,
        "numel": numel,
        "steps": config.steps,
        "mean_after_step_10": fmean(settled) if settled else None,
        "largest_after_step_10": max(settled, default=None),
        "bytes_per_param": sizes,
        "buckets_speculated": stats["buckets_speculated"],
        "buckets_replayed": stats["buckets_replayed"],
        "journal_overflows": stats["journal_overflows"],
        "overflows_after_step_10": stats["journal_overflows"] - early["journal_overflows"],
        "reserved_bytes_per_param": stats["journal_reserved_bytes"] / numel,
        "last_loss": losses[-1],
    }


def plot_journal(report: dict[str, Any], path: Path) -> None:
    """Plots bytes per parameter over the steps, one line per spike factor."""
    with axes_over_steps(path) as axes:
        for row, colour in zip(report["rows"], _COLOURS, strict=False):
            sizes = [math.nan if size is None else size for size in row["bytes_per_param"]]  # nothing speculated: a gap
            axes.plot(range(1, len(sizes) + 1), sizes, ".-", ms=2.5, color=colour, linewidth=1, label=row["name"])
        expected = JOURNAL_USED_BYTES[1]
        label = f"{expected}: the higher mean that a plan expects"
        axes.axhline(expected, color=style.INK, linestyle=":", linewidth=1, label=label)
        axes.set_ylim(bottom=0)
        axes.set_title("Journal, bytes per parameter of the speculated buckets")
