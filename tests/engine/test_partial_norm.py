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


def test_a_bucket_that_is_packed_again_counts_once() -> None:
    done = _native.Completion.already_done()
    norm, bucket, other = PartialNorm(set()), bucket_of(3.0, done), bucket_of(5.0, done)
    for each in (bucket, other):
        norm.expect(each)
    assert norm.look() == 8.0
    bucket.pieces[0].shard.block_sums[0] = 4.0
    norm.expect(bucket)
    assert norm.look() == 9.0
    norm.forget(bucket)
    assert norm.squares == norm.look() == 5.0
    norm.clear()
    assert norm.look() == 0.0


def test_what_has_not_arrived_or_is_not_whole_is_left_out() -> None:
    unfinished = {0}
    arrival = _native.Completion()
    norm, bucket = PartialNorm(unfinished), bucket_of(3.0, arrival)
    norm.expect(bucket)
    unfinished.clear()
    assert norm.look() == 0.0, "it has not arrived"
    unfinished.add(0)
    arrival.finish()
    assert norm.look() == 0.0, "more is to be added to it"
    unfinished.clear()
    assert norm.look() == 3.0
    lost = _native.Completion()
    norm.expect(bucket_of(7.0, lost))
    lost.fail("as told")
    assert norm.look() == 3.0


def test_the_step_before_does_not_count_while_it_is_not_delivered() -> None:
    """A gradient that comes twice has the sum made anew: of this step's gradients, whatever waits to be delivered."""
    with rig(Settings([[1024] * 4], bucket_numel=1024)) as made:
        engine, shards = made.engine, list(reversed(made.shards))
        gradients = {shard.index: torch.ones(shard.numel) for shard in shards}
        for later in (False, True):
            for shard in shards:
                engine.arrive(shard, gradients[shard.index])
            engine.apply(engine.decide(unscale=1.0, max_grad_norm=None), later=later)
        engine.speculator.expect(
            unscale=1.0, max_grad_norm=(3.5 * 1024) ** 0.5
        )  # four gradients of ones would prove a clip
        first, second = shards[:2]
        for shard in (first, second):
            engine.arrive(shard, gradients[shard.index])
        before = engine.stats()["buckets_speculated"]
        engine.retract(second)
        engine.arrive(second, gradients[second.index])
        assert engine.stats()["buckets_speculated"] == before + 1
        assert engine.speculator.norm.squares == 2048.0
