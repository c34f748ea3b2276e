"""Measures what bf16 moments cost in accuracy: the demo's training with fp32 and bf16 moments, over several seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from superoffload.tools.report import style
from superoffload.tools.report.plots import smooth
from superoffload.tools.train.corpus import Corpus
from superoffload.tools.train.injection import Injection
from superoffload.tools.train.trainer import Trainer
from superoffload.tools.train.training_config import STATE_DTYPES, TrainingConfig

Row = dict[str, Any]


def run_state(
    config: TrainingConfig, corpus: Corpus, seeds: Sequence[int], on_step: Callable[[str, int], None]
) -> dict[str, Any]:
    """Returns losses of every run, and the difference that the moments' dtype makes beside that of a seed."""
    rows = [
        _run(config.replace(state_dtype=dtype, seed=seed), corpus, on_step) for seed in seeds for dtype in STATE_DTYPES
    ]
    final = {dtype: [row["held_out_loss"] for row in rows if row["state_dtype"] == dtype] for dtype in STATE_DTYPES}
    differences = [bf16 - fp32 for fp32, bf16 in zip(final["fp32"], final["bf16"], strict=True)]
    return {
        "rows": rows,
        "held_out_loss_fp32": fmean(final["fp32"]),
        "held_out_loss_bf16": fmean(final["bf16"]),
        "mean_difference": fmean(differences),
        "differences": differences,
        "spread_over_seeds_fp32": stdev(final["fp32"]) if len(seeds) > 1 else None,
    }


def _run(config: TrainingConfig, corpus: Corpus, on_step: Callable[[str, int], None]) -> Row:
    name = f"{config.state_dtype} moments, seed {config.seed}"
    with Trainer(config, corpus, Injection(())) as trainer:
        losses = []
        for step in range(1, config.steps + 1):
            losses.append(trainer.train_step(step).loss)
            on_step(name, step)
        held_out = trainer.evaluate()
    return {
        "name": name,
        "state_dtype": config.state_dtype,
        "seed": config.seed,
        "losses": losses,
        "held_out_loss": held_out,
    }


@contextmanager
def axes_over_steps(path: Path) -> Iterator[Any]:
    """Yields axes over steps with their legend outside; saves them to ``path`` when the block ends."""
    with style.drawing(path, 11, 3.8) as figure:
        axes = figure.subplots()
        yield axes
        axes.set_xlabel("step")
        figure.legend(loc="outside right upper")


def plot_state(report: dict[str, Any], path: Path) -> None:
    """Plots the smoothed training loss of every run."""
    with axes_over_steps(path) as axes:
        for row in report["rows"]:
            colour = style.BLUE if row["state_dtype"] == "fp32" else style.ORANGE
            label = f"{row['state_dtype']} moments" if row["seed"] == report["rows"][0]["seed"] else None
            axes.plot(range(1, len(row["losses"]) + 1), smooth(row["losses"]), color=colour, linewidth=1, label=label)
        axes.set_title("Training loss (nats per byte), smoothed, a line per seed")
