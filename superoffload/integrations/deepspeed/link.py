"""Links ZeRO-3 partitions: gradients stay in DeepSpeed's flat host buffer, parameters go to its partitions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from superoffload.engine.bucket import Bucket, Shard
from superoffload.host.memory import host_empty
from superoffload.links.base import Link, PackTicket
from superoffload.links.host import HostLink, SynchronousLink


class PartitionLink(SynchronousLink):
    """Packs gradients in place: the packed gradient is the partition in the flat buffer, so there is no second buffer.

    Writers of the flat buffer must ``retract()`` the shard first. ``pin``: parameters are on a device. ``accelerator``
    serves the buckets whose state and gradients are on it; this link owns it.
    """

    def __init__(self, gradient_of: Callable[[Shard], Tensor], *, pin: bool, accelerator: Link | None = None) -> None:
        """Takes over ``accelerator``; with None no bucket's state is on a device."""
        super().__init__()
        self._gradient_of = gradient_of
        self._pin = pin
        self._accelerator: Link = accelerator or HostLink()  # one without buckets
        self.in_streams = self._accelerator.in_streams

    def prepare(self, buckets: Sequence[Bucket], *, anew: bool) -> None:
        super().prepare(buckets, anew=anew)
        if anew:
            self.pinned_bytes = 0
        self._accelerator.prepare([bucket for bucket in buckets if bucket.resident], anew=anew)

    def check_stream(self) -> None:
        self._accelerator.check_stream()

    def received(self, bucket: Bucket) -> None:
        if bucket.resident:
            self._accelerator.received(bucket)

    def attach(self, bucket: Bucket) -> None:
        gradients = [self._gradient_of(piece.shard)[piece.start : piece.start + piece.numel] for piece in bucket.pieces]
        if self._pin:
            shadow = torch.empty(bucket.padded, dtype=bucket.published_dtype, pin_memory=True, device="cpu")
            self.pinned_bytes += shadow.nbytes
        else:
            shadow = host_empty(bucket.padded, bucket.published_dtype)
        bucket.use_memory(gradients=gradients, shadow=shadow)

    def pack(self, bucket: Bucket, grads: Sequence[Tensor | None]) -> PackTicket:
        if bucket.resident:
            return self._accelerator.pack(bucket, grads)
        assert bucket.gradients is not None
        for piece, here, grad in zip(bucket.pieces, bucket.gradients, grads, strict=True):
            assert here is not None
            address = here.data_ptr() - here.element_size() * piece.start
            assert grad is None or grad.data_ptr() == address, "another gradient buffer"
        return self.pack_pieces(bucket, grads)

    def close(self) -> None:
        self._accelerator.close()
