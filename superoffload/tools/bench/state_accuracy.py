"""Measures what leaner state costs in accuracy: the demo's training with each setting, paired by seed with the default.

Runs of one seed begin with the same weights and see the same batches, so that their difference in held-out loss says
more than either loss. Its mean over the seeds comes with the 95 % confidence interval of Student's t distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from superoffload.tools.report import style
from superoffload.tools.train.corpus import Corpus
from superoffload.tools.train.injection import Injection
from superoffload.tools.train.trainer import Trainer
from superoffload.tools.train.training_config import STATE_SETTINGS, TrainingConfig

Row = dict[str, Any]

DEFAULT = "fp32"
# Student's t for a two-sided interval of 95 %, by degrees of freedom from 1 on.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120)
_T_BEYOND = 2.110  # of 17 degrees, a little wide for more


def run_state(
    config: TrainingConfig,
    corpus: Corpus,
    settings: Sequence[str],
    seeds: Sequence[int],
    on_step: Callable[[str, int], None],
) -> dict[str, Any]:
    """Returns a row per run, and the differences that each setting makes beside those between seeds."""
    names = list(dict.fromkeys((DEFAULT, *settings)))
    rows = [_run(config, name, seed, corpus, on_step) for seed in seeds for name in names]
    losses = {name: [row["held_out_loss"] for row in rows if row["setting"] == name] for name in names}
    return {
        "rows": rows,
        "differences": [_difference(name, losses[name], losses[DEFAULT]) for name in names if name != DEFAULT],
        "spread_over_seeds": stdev(losses[DEFAULT]) if len(seeds) > 1 else None,
    }


def _difference(setting: str, losses: Sequence[float], defaults: Sequence[float]) -> Row:
    each = [loss - default for loss, default in zip(losses, defaults, strict=True)]
    return {
        "setting": setting,
        "ratio_to": DEFAULT,
        "held_out_loss": fmean(losses),
        "mean_difference": fmean(each),
        "half_interval": half_interval(each),
        "differences": each,
    }


def half_interval(values: Sequence[float]) -> float | None:
    """Returns half of the 95 % confidence interval of the mean of ``values``; None: one value has none."""
    freedom = len(values) - 1
    if freedom < 1:
        return None
    t = _T[freedom - 1] if freedom <= len(_T) else _T_BEYOND
    return t * stdev(values) / float(len(values) ** 0.5)


def _run(config: TrainingConfig, setting: str, seed: int, corpus: Corpus, on_step: Callable[[str, int], None]) -> Row:
    moments, masters = STATE_SETTINGS[setting]
    config = config.replace(state_dtype=moments, master_dtype=masters, seed=seed)
    with Trainer(config, corpus, Injection(())) as trainer:
        losses = []
        for step in range(1, config.steps + 1):
            losses.append(trainer.train_step(step).loss)
            on_step(f"{setting}, seed {seed}", step)
        held_out = trainer.evaluate()
    return {
        "name": f"{setting}, seed {seed}",
        "setting": setting,
        "seed": seed,
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
    """Plots each setting's difference from the default: a dot per seed, the mean and its confidence interval."""
    found = report["differences"]
    with style.drawing(path, 9, 3.8) as figure:
        axes = figure.subplots()
        axes.axhline(0, color=style.MUTED, linewidth=1)
        for place, row in enumerate(found):
            axes.plot(
                [place - 0.15] * len(row["differences"]), row["differences"], "o", color=style.MUTED, markersize=4
            )
            axes.errorbar(
                place, row["mean_difference"], row["half_interval"] or 0, fmt="s", color=style.BLUE, capsize=5
            )
        axes.set_xticks(range(len(found)), [row["setting"] for row in found])
        axes.set_ylabel("nats per byte")
        axes.set_title(f"Held-out loss minus that of {DEFAULT}: each seed, mean and 95 % confidence interval")
