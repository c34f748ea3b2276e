"""Measures what leaner state costs in accuracy: one training with each setting, paired by seed with the default.

Runs of one seed begin with the same weights and see the same batches, so that their difference in held-out loss says
more than either loss. Its mean over the seeds comes with the 95 % confidence interval of Student's t distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from benchmarks import style
from benchmarks.state.tasks import Task, optimizer_of
from benchmarks.training.trainer import warmup_cosine

Row = dict[str, Any]

DEFAULT = "fp32"
# Student's t for a two-sided interval of 95 %, by degrees of freedom from 1 on.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120)
_T_BEYOND = 2.110  # of 17 degrees, a little wide for more
_PARTS = 20  # of a run, whose mean losses are kept


def run_state(
    task: Task,
    settings: Sequence[str],
    seeds: Sequence[int],
    on_step: Callable[[str, int], None],
    finished: Sequence[Row] = (),
    on_row: Callable[[dict[str, Any]], None] = lambda report: None,
) -> dict[str, Any]:
    """Returns a row per run, and the differences that each setting makes beside those between seeds.

    ``finished``: rows of earlier runs, which are not run again. ``on_row`` gets the report so far after each run.
    """
    names = list(dict.fromkeys((DEFAULT, *settings)))
    known = {(row["setting"], row["seed"]): row for row in finished}
    rows: list[Row] = []
    for seed in seeds:
        for name in names:
            row = known.get((name, seed))
            rows.append(_run(task, name, seed, on_step) if row is None else row)
            if row is None:
                on_row(_report(task, rows, names))
    return _report(task, rows, names)


def _report(task: Task, rows: Sequence[Row], names: Sequence[str]) -> dict[str, Any]:
    """Compares the runs of the seeds that have all settings."""
    losses: dict[str, dict[int, float]] = {name: {} for name in names}
    for row in rows:
        losses[row["setting"]][row["seed"]] = row["held_out_loss"]
    whole = [seed for seed in losses[names[-1]] if all(seed in losses[name] for name in names)]
    paired = {name: [losses[name][seed] for seed in whole] for name in names}
    return {
        "unit": task.unit,
        "steps": task.steps,
        "rows": list(rows),
        "differences": [_difference(name, paired) for name in names if name != DEFAULT] if whole else [],
        "spread_over_seeds": stdev(paired[DEFAULT]) if len(whole) > 1 else None,
    }


def _difference(setting: str, losses: Mapping[str, Sequence[float]]) -> Row:
    each = [loss - default for loss, default in zip(losses[setting], losses[DEFAULT], strict=True)]
    return {
        "setting": setting,
        "ratio_to": DEFAULT,
        "held_out_loss": fmean(losses[setting]),
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


def _run(task: Task, setting: str, seed: int, on_step: Callable[[str, int], None]) -> Row:
    training = task.start(seed)
    optimizer = optimizer_of(setting, training, task, seed)
    scheduler = warmup_cosine(optimizer.scheduled, task.warmup, task.steps)
    losses = []
    try:
        for step in range(1, task.steps + 1):
            loss = training.loss()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(loss.item())
            on_step(f"{setting}, seed {seed}", step)
        with torch.no_grad():
            held_out = training.held_out()
    finally:
        optimizer.close()
    return {
        "name": f"{setting}, seed {seed}",
        "setting": setting,
        "seed": seed,
        "losses": _means(losses),
        "held_out_loss": held_out,
    }


def _means(losses: Sequence[float]) -> list[float]:
    """Returns the mean losses of some parts of a run, since all of them would fill the file."""
    ends = [len(losses) * part // _PARTS for part in range(_PARTS + 1)]
    return [round(fmean(losses[begin:end]), 5) for begin, end in pairwise(ends)]


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
        axes.set_ylabel(report["unit"])
        axes.set_title(f"Held-out loss minus that of {DEFAULT}: each seed, mean and 95 % confidence interval")
