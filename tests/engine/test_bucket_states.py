"""How shards are laid out in buckets. (The life of a bucket: tests/fuzz, tests/simulator.)"""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from superoffload.engine.bucket import ALIGN, BLOCK, Shard
from superoffload.engine.layout import lay_out


def shard(index: int, numel: int, group: int = 0, dtype: torch.dtype = torch.float32) -> Shard:
    empty = torch.empty(0)
    return Shard(index, f"shard {index}", group, numel, dtype, torch.float32, empty, empty, empty, lambda: empty)


NUMELS = st.one_of(st.integers(0, 40), st.integers(0, 9000), st.sampled_from([1023, 1024, 1025, 2048, 4096]))
SHARDS = st.lists(
    st.tuples(NUMELS, st.integers(0, 2), st.sampled_from([torch.float32, torch.bfloat16])),
    max_size=25,
)


@given(SHARDS, st.one_of(st.integers(1, 8192), st.sampled_from([1, 1023, 1024, 1025, 2048, 1 << 20])))
def test_lay_out(described: list[tuple[int, int, torch.dtype]], bucket_numel: int) -> None:
    shards = [shard(100 + i, numel, group, dtype) for i, (numel, group, dtype) in enumerate(described)]
    buckets = lay_out(shards, bucket_numel)
    for one in shards:  # has every element once
        pieces = sorted((p for bucket in buckets for p in bucket.pieces if p.shard is one), key=lambda p: p.start)
        assert sum(piece.numel for piece in pieces) == one.numel
        assert not pieces or pieces[0].start == 0
        for piece, following in pairwise(pieces):
            assert piece.start + piece.numel == following.start
            assert following.start % BLOCK == 0, "cuts are where the norm's blocks end"
    for bucket in buckets:
        kinds = {(p.shard.group, p.shard.gradient_dtype, p.shard.published_dtype) for p in bucket.pieces}
        assert kinds == {(bucket.group, bucket.gradient_dtype, bucket.published_dtype)}
        end = 0
        for piece in bucket.pieces:
            assert piece.numel > 0 and piece.offset % ALIGN == 0
            assert end <= piece.offset < end + ALIGN, "no overlap, no more padding than alignment needs"
            end = piece.offset + piece.numel
        assert bucket.padded % ALIGN == 0 and end <= bucket.padded < end + ALIGN
        assert end <= max(BLOCK, bucket_numel)
        assert bucket.numel == sum(piece.numel for piece in bucket.pieces)
        assert bucket.missing == len(bucket.present) == len(bucket.pieces)
    last = [max(shards.index(piece.shard) for piece in bucket.pieces) for bucket in buckets]
    assert last == sorted(last), "buckets come in the order in which backward completes them"
