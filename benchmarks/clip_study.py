"""Studies how long clipping lasts when a model is trained from scratch.

    python benchmarks/clip_study.py --steps 3000 --lr 1e-3 3e-3 1e-2 --out benchmarks/results/clip_study.json

Trains the small language model of `benchmarks.training` from random weights at several learning rates, with adaptive
speculation and max_grad_norm 1, and writes one row per 100 steps: how many steps were clipped, what became of the
buckets, what the journal took and how often adaptive chose to speculate. With matplotlib, also a plot next to it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.facts import machine_facts, version_facts
from benchmarks.results_file import write_results
from benchmarks.training.config import ModelConfig, TrainingConfig
from benchmarks.training.corpus import load_corpus
from benchmarks.training.repeatable import torch_threads
from benchmarks.training.trainer import StepRecord, Trainer

WINDOW = 100
COUNTED = ("steps", "clipped_steps", "buckets_speculated", "buckets_committed", "buckets_replayed", "buckets_undone",
           "buckets_stepped", "journal_bytes")  # fmt: skip


def study(lr: float, args: argparse.Namespace) -> dict[str, Any]:
    """Trains once; returns a row per window."""
    model = ModelConfig(layers=2, hidden=96, heads=4, kv_heads=2, mlp=256, sequence=64)
    config = TrainingConfig(
        model=model, steps=args.steps, batch=args.batch, lr=lr, max_grad_norm=1.0, speculation="adaptive",
        bucket_numel=1 << 15, threads=1, torch_threads=1, seed=args.seed,
    )  # fmt: skip
    corpus = load_corpus(None, model.sequence)
    rows: list[dict[str, Any]] = []
    began = time.perf_counter()
    with Trainer(config, corpus) as trainer:
        before, window = trainer.optimizer.stats(), list[StepRecord]()
        speculating = 0
        for step in range(1, config.steps + 1):
            record = trainer.train_step()
            window.append(record)
            speculating += record.counters["buckets_speculated"] > 0
            if step % WINDOW == 0:
                after = trainer.optimizer.stats()
                rows.append(_row(step, window, before, after, speculating))
                before, speculating = after, 0
                window.clear()
        held_out = trainer.evaluate()
        parameters = trainer.model.parameter_count()
    return {
        "lr": lr,
        "parameters": parameters,
        "held_out_loss": held_out,
        "seconds": round(time.perf_counter() - began, 1),
        "config": config.describe(),
        "rows": rows,
    }


def _row(
    step: int, window: Sequence[StepRecord], before: dict[str, Any], after: dict[str, Any], speculating: int
) -> dict[str, Any]:
    counts = {name: after[name] - before[name] for name in COUNTED}
    norms = [record.grad_norm for record in window]
    speculated = counts["buckets_speculated"]
    return {
        "step": step,
        "loss": mean(record.loss for record in window),
        "grad_norm_median": median(norms),
        "clip_rate": counts["clipped_steps"] / len(window),
        "replay_rate": counts["buckets_replayed"] / speculated if speculated else None,
        "steps_that_speculated": speculating / len(window),
        "journal_bytes_per_param": after["journal_bytes_per_param"] if speculated else None,
        **counts,
    }


def plot(runs: Sequence[dict[str, Any]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 9.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = (
        ("loss", "Loss (nats per byte), mean of 100 steps"),
        ("grad_norm_median", "Gradient norm, median; max_grad_norm is 1"),
        ("clip_rate", "Share of steps that are clipped"),
        ("steps_that_speculated", "Share of steps in which adaptive speculated"),
        ("replay_rate", "Share of speculated buckets that were replayed"),
        ("journal_bytes_per_param", "Journal, bytes per speculated parameter"),
    )
    axes = figure.subplots(3, 2, sharex=True).reshape(-1)
    for axis, (column, title) in zip(axes, panels, strict=True):
        for run in runs:
            points = [(row["step"], row[column]) for row in run["rows"] if row[column] is not None]
            if points:
                axis.plot(*zip(*points, strict=True), ".-", linewidth=1.1, markersize=3, label=f"lr {run['lr']:g}")
        axis.set_title(title, fontsize=9)
        axis.grid(alpha=0.3)
    axes[1].axhline(1.0, color="grey", linewidth=0.8, linestyle="--")
    axes[0].legend()
    for axis in axes[-2:]:
        axis.set_xlabel("step")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-3, 3e-3, 1e-2])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/clip_study.json"))
    parser.add_argument("--plot", type=Path, help="where to draw (default: next to --out)")
    args = parser.parse_args()
    runs: list[dict[str, Any]] = []
    with torch_threads(1):
        for lr in args.lr:
            runs.append(study(lr, args))
            print(f"lr {lr:g}: {runs[-1]['seconds']} s, held-out loss {runs[-1]['held_out_loss']:.3f}", flush=True)
            facts = {"machine": machine_facts(), "versions": version_facts(), "runs": runs}
            write_results(args.out, facts)
    plot(runs, args.plot or args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
