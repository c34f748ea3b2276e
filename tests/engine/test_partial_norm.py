"""The part of the norm that is known during backward: each bucket counts once, as it is packed now."""

from __future__ import annotations

import torch

from superoffload import _native
from superoffload.engine.bucket import Bucket, Piece, Shard
from superoffload.engine.speculator import PartialNorm
from tests.support.engine_rig import Settings, rig


def bucket_of(squares: float, arrival: _native.Completion) -> Bucket:
    """One shard of one block whose gradient was packed."""
    state = torch.zeros(4)
    shard = Shard(0, "w", 0, 4, torch.float32, torch.float32, state, state, state, lambda: state)
    shard.block_sums[0] = squares
    bucket = Bucket([Piece(shard, 0, 4, 0)])
    bucket.receive([0])
    bucket.is_packed(arrival, {})
    return bucket


def test_a_bucket_counts_once_when_it_has_arrived_and_is_whole() -> None:
    unfinished: set[int] = set()
    arrival, lost = _native.Completion(), _native.Completion()
    norm, bucket = PartialNorm(unfinished), bucket_of(3.0, arrival)
    norm.expect(bucket)
    assert norm.look() == 0.0, "it has not arrived"
    unfinished.add(0)
    arrival.finish()
    assert norm.look() == 0.0, "more is to be added to it"
    unfinished.clear()
    assert norm.look() == 3.0
    norm.expect(bucket_of(7.0, lost))
    lost.fail("as told")
    assert norm.look() == 3.0
    norm.expect(bucket_of(5.0, _native.Completion.already_done()))
    bucket.pieces[0].shard.block_sums[0] = 4.0
    norm.expect(bucket)
    assert norm.look() == 9.0, "it is packed again"
    norm.forget(bucket)
    assert norm.squares == norm.look() == 5.0
    norm.clear()
    assert norm.look() == 0.0


def test_the_step_before_does_not_count_while_it_is_not_delivered() -> None:
    """A gradient that comes twice has the sum made anew: of this step's gradients, whatever waits to be delivered."""
    with rig(Settings([[1024] * 4], bucket_numel=1024)) as made:
        engine, shards = made.engine, list(reversed(made.shards))
        ones = torch.ones(1024)
        for later in (False, True):
            for shard in shards:
                engine.arrive(shard, ones)
            engine.apply(engine.decide(unscale=1.0, max_grad_norm=None), later=later)
        engine.speculator.expect(unscale=1.0, max_grad_norm=(3.5 * 1024) ** 0.5)  # four would prove a clip
        for shard in shards[:2]:
            engine.arrive(shard, ones)
        before = engine.stats()["buckets_speculated"]
        for _ in range(4):
            engine.retract(shards[1])
            engine.arrive(shards[1], ones)
        assert engine.stats()["buckets_speculated"] == before + 4
        assert engine.speculator.norm.squares == 2048.0
