"""Snapshots are asked before state changes, and no earlier than that."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import pytest
from torch import nn

from superoffload import AdamW
from superoffload.engine.bucket import Shard
from superoffload.engine.snapshot import Snapshot
from tests.support.adamw_training import batch


class AskedSnapshot:
    """Counts the shards that it is asked to protect."""

    over = False

    def __init__(self) -> None:
        self.asked: list[int] = []

    def protect(self, shards: Iterable[Shard]) -> None:
        self.asked += [shard.index for shard in shards]


@pytest.mark.parametrize("rests", [False, True])
def test_a_snapshot_is_asked_in_backward_for_speculated_buckets_only(rests: bool) -> None:
    model = nn.Linear(16, 4, bias=False)
    with AdamW(model.parameters(), speculation="always") as optimizer:
        for seed in range(2):
            optimizer.zero_grad()
            batch(model, seed).backward()
            optimizer.step()
        optimizer.zero_grad()
        (bucket,) = optimizer._core.buckets
        asked = AskedSnapshot()
        optimizer._core.snapshots.add(cast(Snapshot, asked))
        while rests and not bucket.journal_width.rests_for:  # as after journals that overflowed
            bucket.journal_width.learn_from_overflow(bucket.work, 9)
        batch(model, 2).backward()
        assert asked.asked == ([] if rests else [0])
