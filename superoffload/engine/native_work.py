"""Describes a bucket to the worker threads: where its runs are in memory, and of which types."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from superoffload import _native
from superoffload.engine.bucket import ELEMENT_TYPES, Bucket, Piece
from superoffload.engine.journal_reservation import LARGEST_JOURNAL_MEMORY, kept_bytes
from superoffload.engine.moments import scales_address
from superoffload.host.memory import refused

STATE_TYPES = {**ELEMENT_TYPES, torch.uint8: _native.ElementType.q8}


def shared_journals(buckets: Sequence[Bucket], reserved: Sequence[int]) -> list[_native.JournalMemory | None]:
    """Makes the memory in which ``buckets`` have their journals; returns, for each, the one that it shares.

    ``reserved``: bytes that each bucket adds; None is returned for one that adds none.
    """
    found: list[_native.JournalMemory | None] = []
    start = 0
    while start < len(buckets):
        end, total = start + 1, reserved[start]
        while end < len(buckets) and total + reserved[end] <= LARGEST_JOURNAL_MEMORY:
            total += reserved[end]
            end += 1
        try:
            memory = _native.JournalMemory(total, kept_bytes(total)) if total else None
        except MemoryError as error:
            raise refused(total, f"the undo journals (buckets: {end - start})") from error
        found += [memory if nbytes else None for nbytes in reserved[start:end]]
        start = end
    return found


def native_work(
    bucket: Bucket, journal: _native.JournalMemory | None, *, past_cache: bool = False
) -> _native.BucketWork:
    """Makes the work of a bucket whose gradient and shadow are allocated (``padded`` elements each).

    ``journal``: the memory of its journal; None: it has none. ``past_cache``: a step over all buckets exceeds the
    caches (superoffload/host/memory.py).
    """
    runs = [_run(bucket, place, piece, past_cache=past_cache) for place, piece in enumerate(bucket.pieces)]
    return _native.BucketWork(runs, journal)


def _run(bucket: Bucket, place: int, piece: Piece, *, past_cache: bool) -> _native.Run:
    shard = piece.shard
    return _native.Run(
        master=shard.master.data_ptr() + shard.master.element_size() * piece.start,
        exp_avg=shard.exp_avg.data_ptr() + shard.exp_avg.element_size() * piece.start,
        exp_avg_sq=shard.exp_avg_sq.data_ptr() + shard.exp_avg_sq.element_size() * piece.start,
        gradient=_address(bucket.gradients, bucket.gradient, place, piece),
        shadow=_address(bucket.published, bucket.shadow, place, piece),
        numel=piece.numel,
        gradient_type=ELEMENT_TYPES[bucket.gradient_dtype],
        shadow_type=ELEMENT_TYPES[bucket.published_dtype],
        state_type=STATE_TYPES[shard.exp_avg.dtype],
        first_index=piece.start,
        start=shard.offset % 2**32,
        axes=shard.axes,
        noise_stream=shard.noise_stream,
        past_cache=past_cache,
        split_master=shard.upper is not None,
        exp_avg_scales=scales_address(shard.exp_avg, shard.numel, piece.start),
        exp_avg_sq_scales=scales_address(shard.exp_avg_sq, shard.numel, piece.start),
    )


def _address(each: Sequence[Tensor | None] | None, together: Tensor, place: int, piece: Piece) -> int:
    """Returns where the elements of a piece are: in a tensor of their own (0: they have none), or among the others."""
    if each is None:
        return together.data_ptr() + together.element_size() * piece.offset
    own = each[place]
    return 0 if own is None else own.data_ptr()
