"""An optimizer that sleeps between steps: how it is made and stepped, and what memory the process has."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from superoffload import AdamW
from tests.support.adamw_training import batch


def optimizer_of(model: nn.Module, **options: Any) -> AdamW:
    """Two groups, and buckets that cut parameters."""
    params = list(model.parameters())
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 1e-2}]
    return AdamW(groups, **{"threads": 2, "bucket_numel": 1024, **options})


def steps(model: nn.Module, optimizer: AdamW, between: Callable[[], None] = lambda: None, count: int = 7) -> None:
    between()
    for seed in range(count):
        optimizer.zero_grad()
        with optimizer.accumulate():
            batch(model, 100 + seed).backward()
        batch(model, seed, scale=float("inf") if seed == 4 else 1.0).backward()
        optimizer.step()
        between()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
