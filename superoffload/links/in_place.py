"""The in-place link serves parameters on the CPU that are never stepped early: nothing is kept twice in host memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from superoffload import _native
from superoffload.engine.bucket import Bucket, Piece
from superoffload.host.memory import host_empty
from superoffload.links.base import PackTicket, wait_until_ended
from superoffload.links.host import SynchronousLink


class InPlaceLink(SynchronousLink):
    """Has gradients read, and parameters written, where they are.

    That is right only where gradients arrive within ``step()``: nothing can change them before the step has ended, and
    no reader can meet a parameter too early. Split masters have a shadow all the same: it is their upper half, which a
    write to the parameter must not reach.
    """

    in_place = True

    def __init__(self) -> None:
        super().__init__()
        self._held: list[Bucket] = []  # whose gradients and parameters are in use
        self._buckets: list[Bucket] = []
        self._state = AddressRanges(())  # masters and moments
        self._targets: dict[Bucket, list[Tensor]] = {}  # memory of parameters; it may move between steps
        self._written = AddressRanges(())  # that memory

    def prepare(self, buckets: Sequence[Bucket], *, anew: bool) -> None:
        super().prepare(buckets, anew=anew)
        self._buckets = [*([] if anew else self._buckets), *buckets]
        self._targets.clear()
        shards = {piece.shard for bucket in self._buckets for piece in bucket.pieces}
        self._state = AddressRanges(
            tensor for shard in shards for tensor in (shard.master, shard.exp_avg, shard.exp_avg_sq)
        )

    def attach(self, bucket: Bucket) -> None:
        if bucket.splits_masters:
            bucket.use_memory(shadow=host_empty(bucket.padded, bucket.published_dtype, f"the shadow of {bucket.name}"))

    def pack(self, bucket: Bucket, grads: Sequence[Tensor | None]) -> PackTicket:
        """Sums the squares of the gradients; they must stay as they are until the bucket is delivered."""
        if not self._targets:
            self._targets = {each: list(map(_target, each.pieces)) for each in self._buckets}
            self._written = AddressRanges(target for targets in self._targets.values() for target in targets)
        gradients = [
            None if grad is None else self._unwritten(grad.detach().view(-1)[piece.start : piece.start + piece.numel])
            for piece, grad in zip(bucket.pieces, grads, strict=True)
        ]
        bucket.use_memory(gradients=gradients, published=None if bucket.splits_masters else self._targets[bucket])
        self._held.append(bucket)
        self._pieces_of(bucket).pack([0 if gradient is None else gradient.data_ptr() for gradient in gradients])
        return PackTicket(_native.Completion.already_done())

    def _unwritten(self, gradient: Tensor) -> Tensor:
        """Copies a gradient in memory that the step writes: a user may set a parameter as the gradient of another."""
        is_written = self._written.overlap(gradient) or self._state.overlap(gradient)
        return gradient.clone() if is_written else gradient

    def deliver(self, bucket: Bucket, after: _native.Completion) -> _native.Completion:
        if bucket.published is None:
            return super().deliver(bucket, after)
        wait_until_ended(after)
        here = zip(bucket.published, bucket.present, strict=True)
        torch.autograd.graph.increment_version([target for target, present in here if present])
        return _native.Completion.already_done()

    def step_ended(self, *, whole: bool) -> None:
        """Lets go of gradients and parameters."""
        for bucket in self._held:
            bucket.let_go()
        self._held.clear()
        self._targets.clear()


def _target(piece: Piece) -> Tensor:
    return piece.shard.target()[piece.start : piece.start + piece.numel]


class AddressRanges:
    """Holds the addresses of contiguous tensors, as disjoint ranges in their order."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        for begin, end in sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors):
            if self._ends and begin <= self._ends[-1]:
                self._ends[-1] = max(end, self._ends[-1])
            else:
                self._begins.append(begin)
                self._ends.append(end)

    def overlap(self, tensor: Tensor) -> bool:
        """Returns whether a contiguous tensor has memory in any of the ranges."""
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        before_end = bisect_left(self._begins, end)  # of the ranges, those that begin before the tensor ends
        return before_end > 0 and self._ends[before_end - 1] > begin
