"""Describes a bucket to the worker threads: where its runs are in memory, and of which types."""

from __future__ import annotations

from superoffload import _native
from superoffload.engine.bucket import ELEMENT_TYPES, Bucket, Piece
from superoffload.host.memory import refused


def native_work(bucket: Bucket, journal_bytes: int, *, past_cache: bool = False) -> _native.BucketWork:
    """Makes the work of a bucket whose gradient and shadow are allocated (``padded`` elements each).

    ``past_cache``: a step over all buckets exceeds the caches (superoffload/host/memory.py).
    """
    runs = [_run(bucket, place, piece, past_cache=past_cache) for place, piece in enumerate(bucket.pieces)]
    try:
        return _native.BucketWork(runs, journal_bytes)
    except MemoryError as error:
        raise refused(journal_bytes, f"the undo journal of {bucket.name}") from error


def _run(bucket: Bucket, place: int, piece: Piece, *, past_cache: bool) -> _native.Run:
    shard, packed = piece.shard, bucket.gradients
    size = bucket.gradient_dtype.itemsize
    return _native.Run(
        master=shard.master.data_ptr() + shard.master.element_size() * piece.start,
        exp_avg=shard.exp_avg.data_ptr() + shard.exp_avg.element_size() * piece.start,
        exp_avg_sq=shard.exp_avg_sq.data_ptr() + shard.exp_avg_sq.element_size() * piece.start,
        gradient=packed[place].data_ptr() if packed else bucket.gradient.data_ptr() + size * piece.offset,
        shadow=bucket.shadow.data_ptr() + bucket.shadow.element_size() * piece.offset,
        numel=piece.numel,
        gradient_type=ELEMENT_TYPES[bucket.gradient_dtype],
        shadow_type=ELEMENT_TYPES[bucket.published_dtype],
        state_type=ELEMENT_TYPES[shard.exp_avg.dtype],
        first_index=shard.offset + piece.start,
        noise_stream=shard.noise_stream,
        past_cache=past_cache,
        split_master=shard.upper is not None,
    )
