"""During backward: what is added to gradients that were packed and let go is added where they are, in host memory."""

from __future__ import annotations

from torch import Tensor

from superoffload import _native
from superoffload.bucket import BLOCK, ELEMENT_TYPES, Bucket, BucketState, Shard
from superoffload.pipeline.arriving import Arriving


class Adding(Arriving):
    """Sums of several backward passes, without memory for them where gradients are made."""

    def add(self, shard: Shard, addend: Tensor, *, more_to_come: bool) -> None:
        """``addend`` (as for ``arrive()``) belongs to a gradient of this step that was packed and let go.

        Where it raises, nothing was added.
        """
        self.link.check_stream()
        if not more_to_come:
            self._stopwatch.gradient()
        places = self._places.get(shard.index, ())
        with self._caller_at_work():
            ours = addend.to("cpu")  # in the order of the current stream, which has computed it
            for bucket, _ in places:
                self._take_back_to_add(bucket)
            self._abandon_what_is_lost()
            self._raise_worker_failure()
            for bucket, _ in places:
                self._keep_what_was_packed(bucket)
            for bucket, place in places:
                self._add_to(bucket, place, ours)
        self.link.bytes_down += ours.numel() * ours.element_size()
        self._partial = sum(bucket.squares for bucket in self.buckets)
        if more_to_come:
            self._awaited.add(shard.index)
            return
        self._awaited.discard(shard.index)
        for bucket, _ in places:
            complete = bucket.state is BucketState.READY and bucket.missing == 0
            if complete and self._is_whole(bucket) and self._worth_speculating():
                self._speculate(bucket)

    def _take_back_to_add(self, bucket: Bucket) -> None:
        """It was taken for whole, and was not: most likely the rest of this backward is for its other gradients."""
        if bucket.state is BucketState.SPECULATED:
            self._awaited.update(piece.shard.index for piece in bucket.stepped_pieces())
            self._undo_one(bucket)

    def _add_to(self, bucket: Bucket, place: int, addend: Tensor) -> None:
        piece = bucket.pieces[place]
        packed = bucket.gradient[piece.offset : piece.offset + piece.numel]
        total = packed + addend[piece.start : piece.start + piece.numel]
        _native.pack(
            gradient=total.data_ptr(),
            packed=packed.data_ptr(),
            type=ELEMENT_TYPES[bucket.gradient_dtype],
            numel=piece.numel,
            block_sums=piece.shard.block_sums.ctypes.data + 8 * (piece.start // BLOCK),
        )
        bucket.squares = 0.0
        if bucket.state is BucketState.READY and bucket.arrival is not None:
            self._unsummed[bucket] = bucket.arrival  # to be looked at again
