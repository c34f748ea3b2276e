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
    """Describes a packed gradient on its way.

    ``completion`` is done once it is in host memory and the shards' block sums are valid; worker threads wait on it
    without the GIL. ``bit_sums``: sums of the packed bits, for the pieces whose shard asks for them, if the link has a
    kernel for it; the gradients of such pieces are kept.
    """

    completion: _native.Completion
    bit_sums: Mapping[Piece, Sums] = field(default_factory=dict)


class Link(Protocol):
    """Serves one kind of device; owns streams, staging and the shadow."""

    bytes_down: int
    bytes_up: int
    frees_gradients: bool  # no gradient is read after pack() has returned, so its owner may free it
    in_place: bool  # gradients must arrive within step() and are read where they are; parameters are written there
    asynchronous: bool  # deliver() returns before ``after`` is done, and the link reads the shadow later
    bit_sums: BitSums
    sums_what_it_packs: bool  # its PackTickets have the ``bit_sums`` of the packed gradients

    @property
    def bytes_up_early(self) -> int:
        """Counts those of ``bytes_up`` that travelled before the verdict."""

    @property
    def pinned_bytes(self) -> int:
        """Counts the bytes of host memory that are pinned now."""

    def prepare(self, buckets: Sequence[Bucket], *, anew: bool) -> None:
        """Reserves memory before the buckets are attached. ``anew``: they replace all attached ones, which are idle."""

    def attach(self, bucket: Bucket) -> None:
        """Allocates the bucket's packed gradient and shadow (``bucket.padded`` elements each)."""

    def check_stream(self) -> None:
        """Raises DeviceError if the calling thread's stream cannot take work; called before anything is enqueued."""

    def read_on(self, stream: int) -> None:
        """Names a further stream that reads parameters; ``make_visible`` makes it wait like the current one."""

    def received(self, bucket: Bucket) -> None:
        """Notes that a gradient for ``bucket`` is final once the calling thread's stream has run what was enqueued so
        far; its pack() may be called from another stream."""

    def pack(self, bucket: Bucket, grads: Sequence[Tensor | None]) -> PackTicket:
        """Packs one contiguous gradient per piece of the bucket (None: no gradient this step) with its block sums.

        When it returns the gradients may be changed or freed.
        """

    def came_down(self, nbytes: int) -> None:
        """Counts gradients that reached host memory in another way than by ``pack()``."""

    def stage(self, bucket: Bucket, after: _native.Completion) -> None:
        """Copies the shadow to the device once ``after``, a speculated step, is done, where no reader sees it.
        ``deliver()`` then need not copy it again. Links do so if they can and have the memory."""

    def unstage(self, bucket: Bucket) -> None:
        """Discards staged parameters, because the verdict changed the values. Nothing reads the shadow for them when it
        returns."""

    def has_staged(self, bucket: Bucket) -> bool:
        """Returns whether new parameters of ``bucket`` are staged, or on their way, and were not discarded: their
        delivery is a copy on the device."""

    def step_ended(self, *, whole: bool) -> None:
        """Ends a step after its last ``deliver()``. ``whole=False``: the step was abandoned, or all its gradients
        were retracted."""

    def deliver(self, bucket: Bucket, after: _native.Completion) -> _native.Completion:
        """Copies the shadow of the bucket's present pieces to the published parameters, once ``after`` is done.

        The copy is made even if ``after`` failed, since an operation after the verdict is completed. The result is done
        once the copy was made, or once it is enqueued where streams order it.
        """

    def has_room(self, nbytes: int) -> bool:
        """Returns whether ``nbytes`` of memory stay free during a whole step on the device of the gradients."""

    def make_visible(self, bucket: Bucket) -> None:
        """Makes the training thread's stream wait for a delivery, so that its later work reads the new parameters."""

    def await_copies(self) -> None:
        """Waits until no copy is under way: masters are loaded then, and split ones have their halves in the shadow."""

    def give_back(self) -> None:
        """Frees what was reserved for buckets, in host memory and on the device, once no copy is under way. The owner
        lets go of all buckets; ``prepare(..., anew=True)`` reserves memory again."""

    def close(self) -> None:
        """Ends all work. The buckets' memory stays readable. Idempotent."""


def wait_until_ended(operation: _native.Completion) -> None:
    """Waits for ``operation`` and ignores its failure: the engine waits for it too, and reports the failure."""
    with suppress(RuntimeError):
        operation.wait()
