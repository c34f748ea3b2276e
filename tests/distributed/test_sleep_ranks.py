"""Ranks sleep and wake each for itself, and go on with the bits of ranks that never slept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.rank_processes import on_ranks, optimizer_of
from tests.support.saved_ranks import build, step


def digests(way: str, slept: tuple[int, ...], folder: Path | None = None) -> Any:
    """Ranks in ``slept`` sleep after every step, with their state in ``folder``; the norm clips most steps."""
    model, options = build(way)
    with optimizer_of(model, rank_check="full", max_grad_norm=0.5, **options) as optimizer:
        held = []
        for seed in range(5):
            step(model, optimizer, seed)
            if dist.get_rank() in slept:
                optimizer.zero_grad()
                optimizer.sleep(folder)
                held.append(optimizer.stats()["host_bytes"])
                optimizer.wake()
        return optimizer.state_digests(), optimizer.grad_norm, len(set(held)) <= 1


@pytest.mark.parametrize("way", ["8-bit moments", "replicate", "shard"])
def test_ranks_sleep_alone_or_together(way: str, tmp_path: Path) -> None:
    expected = on_ranks(2, digests, way, ())
    assert on_ranks(2, digests, way, (1,)) == expected
    assert on_ranks(2, digests, way, (0, 1), tmp_path) == expected
