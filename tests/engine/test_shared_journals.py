"""The memory that the journals of all buckets share: what one leaves another uses, and it all comes back."""

from __future__ import annotations

import pytest

from superoffload.errors import WorkerError
from tests.support.engine_rig import Rig, Settings, rig

FOUR = Settings([[4096] * 4], bucket_numel=4096)  # four buckets


def step(made: Rig) -> None:
    gradients = {shard.index: made.gradient(shard) for shard in made.shards}
    for shard in reversed(made.shards):
        made.arrive(shard, gradients[shard.index])
    made.step_both(gradients)
    made.check()


def test_buckets_share_the_memory_of_their_journals() -> None:
    """The escapes of the first take the room of the last, which is left out, or undone where its escapes find none."""
    with rig(FOUR, arena=-0.75) as made:  # 1.25 bytes per parameter
        for _ in range(8):
            step(made)
        stats = made.engine.stats()
        assert 8 < stats["buckets_committed"] == stats["buckets_speculated"] - stats["buckets_undone"] < 8 * 4
        assert stats["buckets_stepped"] == 8 * 4 - stats["buckets_committed"]
        assert 4 * 4096 < stats["journal_reserved_bytes"] <= 1.25 * 4 * 4096


def test_a_failed_speculation_gives_its_room_back() -> None:
    """Else the journals would not begin at the front again, and later steps would find no room."""
    with rig(FOUR, width=1, arena=0.25) as made:
        made.engine.pool.inject_fault(2, "a bit fell over")
        for shard in reversed(made.shards):
            made.arrive(shard, made.gradient(shard))
        verdict = made.engine.decide(unscale=1.0, max_grad_norm=None)
        with pytest.raises(WorkerError, match="a bit fell over"):
            made.engine.apply(verdict)
        before = made.engine.stats()
        step(made)
        after = made.engine.stats()
        assert after["buckets_committed"] - before["buckets_committed"] == 4


def test_memory_of_journals_is_counted_once() -> None:
    """Buckets that follow the order of backward have new memory, in which nothing was written yet."""
    with rig(FOUR) as made:
        gradients = {shard.index: made.gradient(shard) for shard in made.shards}
        for shard in made.shards:  # not the reverse of the registration
            made.arrive(shard, gradients[shard.index])
        assert made.engine.stats()["journal_reserved_bytes"] >= 4 * 4096
        made.step_both(gradients)
        assert made.engine.stats()["journal_reserved_bytes"] == 0
        made.check()
