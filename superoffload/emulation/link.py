"""A link in virtual time: gradients reach host memory, and parameters the model, when their copy is over."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from superoffload import _native
from superoffload.bucket import Bucket
from superoffload.emulation.clock import VirtualClock, VirtualCompletion, when_done
from superoffload.link import HostLink, PackTicket


class VirtualLink(HostLink):
    """Down and up each copy one bucket after the other. ``seconds_down(bytes)``, ``seconds_up(bytes)``: how long.

    A copy reads its source when it ends: if that was overwritten too early, the bits show it.
    """

    asynchronous = True
    frees_gradients = True

    def __init__(
        self, clock: VirtualClock, seconds_down: Callable[[int], float], seconds_up: Callable[[int], float]
    ) -> None:
        super().__init__()
        self._clock = clock
        self._seconds_down = seconds_down
        self._seconds_up = seconds_up
        self._down_until = 0.0
        self._last_up: VirtualCompletion | None = None
        self._lost: tuple[int, str] | None = None
        self.losses = 0  # that were asked for and have happened

    def lose(self, copies_until: int, message: str) -> None:
        """The n-th gradient from now never reaches host memory."""
        self._lost = (copies_until, message)

    def pack(self, bucket: Bucket, grads: Sequence[Tensor | None]) -> PackTicket:
        done = VirtualCompletion(self._clock)
        staged = [None if grad is None else grad.clone() for grad in grads]  # on the device, which pays no host memory
        numel = sum(piece.numel for piece, grad in zip(bucket.pieces, grads, strict=True) if grad is not None)
        began = max(self._clock.now, self._down_until)
        self._down_until = began + self._seconds_down(numel * bucket.gradient_dtype.itemsize)
        lost = self._is_lost()

        def arrive() -> None:
            done.times = (began, self._clock.now)
            if lost:
                done.fail(lost)
                return
            super(VirtualLink, self).pack(bucket, staged)
            done.finish()

        self._clock.at(self._down_until, arrive)
        return PackTicket(bucket, done)

    def _is_lost(self) -> str:
        if self._lost is None:
            return ""
        left, message = self._lost
        self._lost = (left - 1, message) if left > 0 else None
        self.losses += left == 0
        return message if left == 0 else ""

    def deliver(self, bucket: Bucket, after: _native.Completion) -> _native.Completion:
        """In the order of the calls, which is that of forward: what is done already does not overtake what is needed
        first."""
        done = VirtualCompletion(self._clock)
        pieces = [piece for piece, present in zip(bucket.pieces, bucket.present, strict=True) if present]
        size = sum(piece.numel for piece in pieces) * bucket.shadow.element_size()

        def begin() -> None:
            began = self._clock.now

            def end() -> None:
                for piece in pieces:
                    source = bucket.shadow[piece.offset : piece.offset + piece.numel]
                    piece.shard.target()[piece.start : piece.start + piece.numel].copy_(source)
                self.bytes_up += size
                done.times = (began, self._clock.now)
                done.finish()

            self._clock.at(began + self._seconds_up(size), end)

        before, self._last_up = self._last_up, done
        when_done(before, lambda: when_done(after, begin))
        return done
