"""DTensors in any layout: tensor parallel, sharded twice, replicated, experts on a mesh of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.meshes import LAYOUTS, train, train_alone
from tests.support.rank_processes import on_ranks


def both_ways(name: str, dtype: torch.dtype, options: dict[str, Any]) -> list[Any]:
    return [train(name, dtype=dtype, speculation=mode, **options) for mode in ("always", "never")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_speculation_changes_no_bit(name: str, dtype: torch.dtype) -> None:
    for speculative, synchronous in on_ranks(LAYOUTS[name].ranks, both_ways, name, dtype, {}):
        assert speculative.digests == synchronous.digests and speculative.digests
        assert speculative.norms == synchronous.norms
        stats = speculative.stats
        assert stats["steps"] == 5 and stats["skipped_steps"] == 1
        assert stats["buckets_committed"] and stats["buckets_replayed"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_it_trains_like_one_process(name: str) -> None:
    """Sums over ranks are in another order, so the last bits differ."""
    alone = train_alone(name)
    for one in on_ranks(LAYOUTS[name].ranks, train, name):
        assert one.norms == pytest.approx(one.in_double, rel=1e-9)
        assert one.norms == pytest.approx(alone.norms, rel=1e-5)
        for key, master in alone.masters.items():
            torch.testing.assert_close(one.masters[key], master, rtol=0, atol=3e-5)
