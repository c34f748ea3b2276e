"""The life of a bucket, and how shards are laid out in buckets."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from superoffload.engine.bucket import ALIGN, BLOCK, Bucket, Piece, Shard
from superoffload.engine.bucket_state import BucketState
from superoffload.engine.layout import lay_out
from superoffload.errors import StateError

F, R, S, U = BucketState.FILLING, BucketState.READY, BucketState.SPECULATED, BucketState.UNDONE
C, P, T = BucketState.COMMITTED, BucketState.REPLAYED, BucketState.STEPPED
K, A = BucketState.SKIPPED, BucketState.ABANDONED
PUB, SET = BucketState.PUBLISHED, BucketState.SETTLED

# DESIGN's life of a bucket, written down a second time: everything else must be refused.
ALLOWED = {
    (F, R),  # the gradient is complete
    (F, A),  # never was
    (R, F),  # it was not final after all
    (R, S),
    (R, T),  # not speculated
    (R, PUB),  # nor stepped in one pass
    (PUB, SET),
    (R, K),
    (R, A),
    (S, C),
    (S, P),
    (S, K),
    (S, A),
    (S, U),
    (U, F),
    *((ended, F) for ended in (C, P, T, SET, K, A)),  # the next step
}


def shard(index: int, numel: int, group: int = 0, dtype: torch.dtype = torch.float32) -> Shard:
    empty = torch.empty(0)
    return Shard(index, f"shard {index}", group, numel, dtype, torch.float32, empty, empty, empty, lambda: empty)


def bucket_in(state: BucketState) -> Bucket:
    bucket = Bucket([Piece(shard(0, 10), 0, 10, 0)])
    bucket.state = state
    return bucket


def test_transitions() -> None:
    for before, after in product(BucketState, BucketState):
        bucket = bucket_in(before)
        if (before, after) in ALLOWED:
            bucket.move(after)
            assert bucket.state is after
            continue
        with pytest.raises(StateError, match=f"from {before.value} to {after.value}"):
            bucket.move(after)
        assert bucket.state is before


def test_a_bucket_is_renewed_unless_its_work_would_be_forgotten() -> None:
    for state in (F, C, P, T, SET, K, A):
        bucket = bucket_in(state)
        bucket.receive([0])
        bucket.renew()
        assert (bucket.state, bucket.present, bucket.missing) == (F, [False], 1)
    for state in (S, PUB):
        bucket = bucket_in(state)
        with pytest.raises(StateError):
            bucket.renew()
        assert bucket.state is state


SHARDS = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 40), st.integers(0, 9000), st.sampled_from([1023, 1024, 1025, 2048, 4096])),
        st.integers(0, 2),
        st.sampled_from([torch.float32, torch.bfloat16]),
    ),
    max_size=25,
)


@given(SHARDS, st.one_of(st.integers(1, 8192), st.sampled_from([1, 1023, 1024, 1025, 2048, 1 << 20])))
def test_lay_out(described: list[tuple[int, int, torch.dtype]], bucket_numel: int) -> None:
    shards = [shard(100 + i, numel, group, dtype) for i, (numel, group, dtype) in enumerate(described)]
    buckets = lay_out(shards, bucket_numel)
    check_every_element_once(shards, buckets)
    for bucket in buckets:
        check_one_kind(bucket)
        check_places(bucket, max(BLOCK, bucket_numel))
    last = [max(shards.index(piece.shard) for piece in bucket.pieces) for bucket in buckets]
    assert last == sorted(last), "buckets come in the order in which backward completes them"


def check_every_element_once(shards: list[Shard], buckets: list[Bucket]) -> None:
    for one in shards:
        pieces = sorted(
            (piece for bucket in buckets for piece in bucket.pieces if piece.shard is one), key=lambda p: p.start
        )
        assert sum(piece.numel for piece in pieces) == one.numel
        if pieces:
            assert pieces[0].start == 0
        for piece, following in pairwise(pieces):
            assert piece.start + piece.numel == following.start
            assert following.start % BLOCK == 0, "cuts are where the norm's blocks end"


def check_one_kind(bucket: Bucket) -> None:
    kinds = {(p.shard.group, p.shard.gradient_dtype, p.shard.published_dtype) for p in bucket.pieces}
    assert kinds == {(bucket.group, bucket.gradient_dtype, bucket.published_dtype)}


def check_places(bucket: Bucket, limit: int) -> None:
    end = 0
    for piece in bucket.pieces:
        assert piece.numel > 0
        assert piece.offset % ALIGN == 0
        assert end <= piece.offset < end + ALIGN, "no overlap, no more padding than alignment needs"
        end = piece.offset + piece.numel
    assert bucket.padded % ALIGN == 0
    assert end <= bucket.padded < end + ALIGN
    assert end <= limit
    assert bucket.numel == sum(piece.numel for piece in bucket.pieces)
    assert bucket.missing == len(bucket.present) == len(bucket.pieces)


@pytest.mark.parametrize(
    ("numels", "bucket_numel", "expected"),
    [
        ([100, 100], 1024, [[100, 100]]),
        ([1000, 100], 1024, [[1000], [100]]),  # would not fit
        ([3000], 1024, [[1024], [1024], [952]]),
        ([3000], 2047, [[1024], [1024], [952]]),  # a whole number of blocks
        ([3000, 50], 1024, [[1024], [1024], [952, 50]]),  # the rest of a bucket is used
        ([50, 3000], 4096, [[50, 3000]]),
        ([0, 10], 1024, [[10]]),
        ([], 1024, []),
    ],
)
def test_lay_out_examples(numels: list[int], bucket_numel: int, expected: list[list[int]]) -> None:
    shards = [shard(i, numel) for i, numel in enumerate(numels)]
    assert [[piece.numel for piece in bucket.pieces] for bucket in lay_out(shards, bucket_numel)] == expected
