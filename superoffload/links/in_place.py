"""The in-place link serves parameters on the CPU that are never stepped early: nothing is kept twice in host memory."""

from __future__ import annotations

from collections.abc import Sequence

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
        self._written: dict[Bucket, set[int]] = {}  # storages, by address, that a step writes

    def prepare(self, buckets: Sequence[Bucket], *, anew: bool) -> None:
        super().prepare(buckets, anew=anew)
        if anew:
            self._written.clear()

    def attach(self, bucket: Bucket) -> None:
        if bucket.splits_masters:
            bucket.use_memory(shadow=host_empty(bucket.padded, bucket.published_dtype, f"the shadow of {bucket.name}"))
        self._written[bucket] = {_storage(_target(piece)) for piece in bucket.pieces}

    def pack(self, bucket: Bucket, grads: Sequence[Tensor | None]) -> PackTicket:
        """Sums the squares of the gradients; they must stay as they are until the bucket is delivered."""
        targets = [_target(piece) for piece in bucket.pieces]
        self._written[bucket] = set(map(_storage, targets))
        gradients = [
            None if grad is None else self._unwritten(grad.detach().view(-1)[piece.start : piece.start + piece.numel])
            for piece, grad in zip(bucket.pieces, grads, strict=True)
        ]
        bucket.use_memory(gradients=gradients, published=None if bucket.splits_masters else targets)
        self._held.append(bucket)
        self._pieces_of(bucket).pack([0 if gradient is None else gradient.data_ptr() for gradient in gradients])
        return PackTicket(_native.Completion.already_done())

    def _unwritten(self, gradient: Tensor) -> Tensor:
        """Copies a gradient that is the memory of a parameter, as a user may set it: the step would change it."""
        storage = _storage(gradient)
        return gradient.clone() if any(storage in written for written in self._written.values()) else gradient

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


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _target(piece: Piece) -> Tensor:
    """Finds the memory of a parameter; it may have moved since the last step."""
    return piece.shard.target()[piece.start : piece.start + piece.numel]
