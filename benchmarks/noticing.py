r"""Measures what noticing writes to parameters costs per step if no version counter shows them, as through ``.data``.

    python -m benchmarks.noticing --json benchmarks/results/noticing-x86.json

Trains a language model on this machine's processors and times the two readings of every step: published parameters
are read once when they are published, and once when the next step begins.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.results_file import write_rows
from benchmarks.training.config import ModelConfig
from benchmarks.training.model import DTYPES, build_model, compute_dtype
from superoffload import AdamW
from superoffload.optimizer import edits, step

MODEL = ModelConfig(layers=12, hidden=640, heads=10, kv_heads=5, mlp=2560, sequence=2048, vocabulary=16000)
# The two readings, and what looks closer at the parameters that they find.
PARTS = ((edits, "unwritten"), (edits, "find_edits"), (step, "remember"))


class Stopwatch:
    """Counts the seconds inside functions that are called through it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


def measure(dtype: str, tokens: int, steps: int, watch: Stopwatch) -> dict[str, Any]:
    model = build_model(MODEL, DTYPES[dtype], compute_dtype(DTYPES[dtype], "auto"), seed=0)
    text = torch.randint(MODEL.vocabulary, (1, tokens + 1))
    whole, noticing = [], []
    with AdamW(model.parameters(), max_grad_norm=1.0) as optimizer:
        for _ in range(2 + steps):  # the first ones lay out and touch memory
            began, watch.seconds = time.perf_counter(), 0.0
            optimizer.zero_grad()
            model.loss(text).backward()
            optimizer.step()
            whole.append(time.perf_counter() - began)
            noticing.append(watch.seconds)
    return {
        "name": f"{dtype}, {tokens} tokens",
        "numel": model.parameter_count(),
        "tokens": tokens,
        "seconds_median": statistics.median(whole[2:]),
        "noticing_seconds_median": statistics.median(noticing[2:]),
        "share": statistics.median(part / all_of_it for part, all_of_it in zip(noticing[2:], whole[2:], strict=True)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512, 2048], help="per step")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    watch, rows = Stopwatch(), []
    for module, name in PARTS:
        setattr(module, name, watch.around(getattr(module, name)))
    for dtype in DTYPES:
        for tokens in args.tokens:
            rows.append(row := measure(dtype, tokens, args.steps, watch))
            print(
                f"{row['name']:>18}: a step {1e3 * row['seconds_median']:.0f} ms, noticing "
                f"{1e3 * row['noticing_seconds_median']:.1f} ms, {row['share']:.2%}"
            )
    if args.json:
        write_rows(args.json, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
