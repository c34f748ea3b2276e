"""Measures the undo journal's size in real training: every step of the demo's model, also with spiking gradients.

A factor r means that every step was speculated with gradients r times those that were finally applied: the clip is set
to 1/r of the last norm after backward, when all buckets are speculated already.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks import command, style
from benchmarks.training.config import ModelConfig
from benchmarks.training.corpus import BatchSource, load_corpus
from benchmarks.training.model import build_model, compute_dtype, decayed_groups
from benchmarks.training.schedule import warmup_cosine
from superoffload import AdamW
from superoffload.engine.journal import JOURNAL_BYTES_PER_PARAM

FACTORS = (1.0, 3.0, 10.0, 30.0, 100.0)
SETTLED_AFTER = 10  # steps; before, exp_avg_sq changes by its own size and fewer words fit their codes
_COLOURS = (style.BLUE, style.GREEN, style.ORANGE, style.RED, style.MUTED, style.INK)


def make_parser() -> argparse.ArgumentParser:
    return command.parser(
        "journal",
        "Trains the demo's model with every step speculated and reports the journal's bytes per parameter, without "
        "clipping and with gradients that are a factor larger than the clipped ones.",
    )


def train(factor: float, steps: int) -> dict[str, Any]:
    """Returns a row; factor 1 is training without clipping."""
    name = "no clipping" if factor == 1 else f"gradients {factor:g} times the clipped ones"
    config = ModelConfig()
    model = build_model(config, torch.bfloat16, compute_dtype(torch.bfloat16), 0)
    numel = model.parameter_count()
    batches = BatchSource(load_corpus(config.sequence).train, 16, config.sequence, 1)
    sizes: list[float | None] = []
    norm = None
    options: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "speculation": "always", "bucket_numel": 1 << 18}
    with AdamW(decayed_groups(model, 0.1), max_grad_norm=None, **options) as optimizer:
        scheduler = warmup_cosine(optimizer, max(1, min(20, steps // 10)), steps)
        before = early = optimizer.stats()
        for step in range(1, steps + 1):
            loss = model.loss(batches.next())
            loss.backward()
            optimizer.max_grad_norm = norm / factor if factor > 1 and norm is not None else None
            optimizer.step()
            optimizer.zero_grad()
            optimizer.max_grad_norm = None
            scheduler.step()
            if math.isfinite(found := float(optimizer.grad_norm)):
                norm = found
            now = optimizer.stats()
            speculated = now["buckets_speculated"] > before["buckets_speculated"]
            sizes.append(now["journal_bytes_per_param"] if speculated else None)
            before, early = now, now if step <= SETTLED_AFTER else early
        stats = optimizer.stats()
    settled = [size for size in sizes[SETTLED_AFTER:] if size is not None]
    return {
        "name": name,
        "factor": factor,
        "numel": numel,
        "steps": steps,
        "mean_after_step_10": fmean(settled) if settled else None,
        "largest_after_step_10": max(settled, default=None),
        "bytes_per_param": sizes,
        "buckets_speculated": stats["buckets_speculated"],
        "buckets_replayed": stats["buckets_replayed"],
        "journal_overflows": stats["journal_overflows"],
        "overflows_after_step_10": stats["journal_overflows"] - early["journal_overflows"],
        "reserved_bytes_per_param": stats["journal_reserved_bytes"] / numel,
        "last_loss": loss.item(),
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    factors, steps = ((1.0, 10.0), 20) if args.quick else (FACTORS, 300)
    torch.use_deterministic_algorithms(True)
    print(f"{'run':36} {'mean B/param':>12} {'largest':>8} {'overflows':>9} {'reserved':>8}   after step 10")
    rows = []
    for factor in factors:
        row = train(factor, steps)
        rows.append(row)
        print(
            f"{row['name']:36} {row['mean_after_step_10'] or math.nan:>12.3f} "
            f"{row['largest_after_step_10'] or math.nan:>8.3f} {row['overflows_after_step_10']:>9} "
            f"{row['reserved_bytes_per_param']:>8.2f}",
            flush=True,
        )
    return {"rows": rows}


def plot(report: dict[str, Any], path: Path) -> None:
    """Draws bytes per parameter over the steps, a line per factor."""
    with style.drawing(path, 11, 3.8) as figure:
        axes = figure.subplots()
        for row, colour in zip(report["rows"], _COLOURS, strict=False):
            sizes = [math.nan if size is None else size for size in row["bytes_per_param"]]  # nothing speculated: a gap
            axes.plot(range(1, len(sizes) + 1), sizes, ".-", ms=2.5, color=colour, linewidth=1, label=row["name"])
        label = f"{JOURNAL_BYTES_PER_PARAM:g}: reserved"
        axes.axhline(JOURNAL_BYTES_PER_PARAM, color=style.INK, linestyle=":", linewidth=1, label=label)
        axes.set_ylim(bottom=0)
        axes.set_title("Journal, bytes per parameter of the speculated buckets")
        axes.set_xlabel("step")
        figure.legend(loc="outside right upper")


if __name__ == "__main__":
    raise SystemExit(command.start(make_parser(), run, plot))
