"""A link moves gradients down to host memory and parameters back up; this is what every link offers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from superoffload import _native
from superoffload.engine.bucket import Bucket, Piece
from superoffload.host.bits import BitSums, Sums


@dataclass(frozen=True)
class PackTicket:
    """A packed gradient on its way; the shards' block sums are valid once ``completion`` is done.

    ``bit_sums``: of the bits that were packed, for the pieces whose shard asks for them and whose link has a kernel for
    it; such pieces' gradients are still there.
    """

    bucket: Bucket
    completion: _native.Completion
    bit_sums: Mapping[Piece, Sums] = field(default_factory=dict)


class Link(Protocol):
    """One per device kind; owns streams, staging and the shadow."""

    bytes_down: int
    bytes_up: int
    frees_gradients: bool  # nobody reads a gradient again once pack() has returned, so its owner may let it go
    asynchronous: bool  # deliver() returns before ``after`` is done, and reads the shadow by itself once it is
    bit_sums: BitSums
    sums_what_it_packs: bool  # a PackTicket has the ``bit_sums`` of what was packed

    @property
    def bytes_up_early(self) -> int:
        """Of ``bytes_up``, those that travelled before the verdict."""

    @property
    def pinned_bytes(self) -> int:
        """Of host memory, now."""

    def prepare(self, buckets: Sequence[Bucket], *, anew: bool) -> None:
        """Before these are attached. ``anew``: instead of all that were attached before, which are idle."""

    def attach(self, bucket: Bucket) -> None:
        """Allocates the bucket's packed gradient and shadow (``bucket.padded`` elements each)."""

    def check_stream(self) -> None:
        """Before anything is enqueued: DeviceError where the calling thread's stream cannot take it."""

    def read_on(self, stream: int) -> None:
        """Parameters are also read on this stream, which ``make_visible`` has wait as the current one."""

    def received(self, bucket: Bucket) -> None:
        """A gradient for ``bucket`` is final behind what the calling thread has enqueued; its pack() may be called
        from another stream."""

    def pack(self, bucket: Bucket, grads: Sequence[Tensor | None]) -> PackTicket:
        """Packs one contiguous gradient per piece of the bucket (None: no gradient this step) with its block sums.

        When it returns the gradients may be changed or freed.
        """

    def came_down(self, nbytes: int) -> None:
        """Gradients that were brought to host memory in another way than by ``pack()``."""

    def arrived(self, ticket: PackTicket) -> _native.Completion:
        """Done once the packed gradient is in host memory; worker threads wait on it without the GIL."""

    def stage(self, bucket: Bucket, after: _native.Completion) -> None:
        """Copies the shadow to the device once ``after``, a speculated step, is done: no reader sees it there, and
        ``deliver()`` need not copy it again. Links do so where they can and there is memory for it."""

    def unstage(self, bucket: Bucket) -> None:
        """The verdict wants other parameters than those that were staged, if any were. When it returns, nothing reads
        the shadow for them any more."""

    def step_ended(self, *, whole: bool) -> None:
        """What is to be delivered has been given to ``deliver()``. Not ``whole``: there was no verdict, or there is no
        gradient left for now."""

    def deliver(self, bucket: Bucket, after: _native.Completion) -> _native.Completion:
        """Copies the shadow of the bucket's present pieces to the published parameters, once ``after`` is done.

        ``after`` may have failed: an operation after the verdict is completed even so. What is returned is done once
        the copy was made, or where streams order it: enqueued.
        """

    def has_room(self, nbytes: int) -> bool:
        """Whether so much memory, where gradients are, is in use at no time of a step."""

    def make_visible(self, bucket: Bucket) -> None:
        """On the training thread, once the delivery is done: what it enqueues from here on reads the new parameters."""

    def close(self) -> None:
        """Ends what runs. The buckets' memory stays readable. Idempotent."""


def wait_until_ended(operation: _native.Completion) -> None:
    """Whether it failed is the core's business, which waits for it too."""
    with suppress(RuntimeError):
        operation.wait()
