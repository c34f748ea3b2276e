"""Emulates a link in virtual time: gradients reach host memory, and parameters the model, when their copy is over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from benchmarks.emulation.clock import VirtualClock, VirtualCompletion, when_done
from superoffload import _native
from superoffload.engine.bucket import Bucket
from superoffload.links.base import PackTicket
from superoffload.links.host import HostLink


@dataclass(eq=False)
class _Staged:
    """Holds new parameters of a bucket on the device, before the verdict."""

    done: VirtualCompletion
    parameters: Tensor | None = None  # None until they are on the device
    copying: bool = False
    wanted: bool = True


class VirtualLink(HostLink):
    """Copies one bucket after the other, down and up. ``seconds_down(bytes)``, ``seconds_up(bytes)``: durations.

    A copy reads its source when it ends: if that was overwritten too early, the bits show it. ``stages(bucket)``:
    whether the device has memory for the new parameters of a speculated bucket. They go up as soon as it is stepped,
    and a commit takes no time on the link: the copy on the device is not counted.
    """

    asynchronous = True
    frees_gradients = True

    def __init__(
        self,
        clock: VirtualClock,
        seconds_down: Callable[[int], float],
        seconds_up: Callable[[int], float],
        stages: Callable[[Bucket], bool] = lambda bucket: True,
    ) -> None:
        super().__init__()
        self._stages = stages
        self._staged: dict[Bucket, _Staged] = {}
        self._clock = clock
        self._seconds_down = seconds_down
        self._seconds_up = seconds_up
        self._down_until = 0.0
        self._last_up: VirtualCompletion | None = None
        self._lost: tuple[int, str] | None = None
        self.losses = 0  # requested losses that have happened
        self.delivered_staged = 0  # buckets whose parameters were on the device at the verdict

    def lose(self, copies_until: int, message: str) -> None:
        """Loses the n-th gradient from now: it never reaches host memory."""
        self._lost = (copies_until, message)

    def pack(self, bucket: Bucket, grads: Sequence[Tensor | None]) -> PackTicket:
        done = VirtualCompletion(self._clock)
        staged = [None if grad is None else grad.clone() for grad in grads]  # on the device, which uses no host memory
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
        return PackTicket(done)

    def _is_lost(self) -> str:
        if self._lost is None:
            return ""
        left, message = self._lost
        self._lost = (left - 1, message) if left > 0 else None
        self.losses += left == 0
        return message if left == 0 else ""

    def stage(self, bucket: Bucket, after: _native.Completion) -> None:
        if not self._stages(bucket):
            return
        staged = self._staged[bucket] = _Staged(VirtualCompletion(self._clock))

        def begin() -> None:
            if after.error or not staged.wanted:
                staged.done.finish()
                return
            size = _size_up(bucket)
            staged.copying = True

            def end() -> None:
                self.bytes_up += size
                self.bytes_up_early += size
                staged.parameters = bucket.shadow.clone()
                staged.done.finish()

            self._clock.at(self._clock.now + self._seconds_up(size), end)

        before, self._last_up = self._last_up, staged.done
        when_done(before, lambda: when_done(after, begin))

    def has_staged(self, bucket: Bucket) -> bool:
        return bucket in self._staged

    def unstage(self, bucket: Bucket) -> None:
        staged = self._staged.pop(bucket, None)
        if staged is not None:
            staged.wanted = False
            if staged.copying:
                staged.done.wait()

    def step_ended(self, *, whole: bool) -> None:
        self._staged.clear()

    def deliver(self, bucket: Bucket, after: _native.Completion) -> _native.Completion:
        """Delivers in the order of the calls, which is forward's: a bucket that is done early does not overtake one
        that is needed first."""
        done = VirtualCompletion(self._clock)
        staged = self._staged.pop(bucket, None)

        def begin() -> None:
            began = self._clock.now
            is_there = staged is not None and staged.parameters is not None
            size = 0 if is_there else _size_up(bucket)
            self.delivered_staged += is_there

            def end() -> None:
                source = bucket.shadow if staged is None or staged.parameters is None else staged.parameters
                for piece in bucket.stepped_pieces():
                    target = piece.shard.target()[piece.start : piece.start + piece.numel]
                    target.copy_(source[piece.offset : piece.offset + piece.numel])
                self.bytes_up += size
                done.times = (began, self._clock.now)
                done.finish()

            self._clock.at(began if is_there else began + self._seconds_up(size), end)

        before, self._last_up = self._last_up, done
        when_done(before, lambda: when_done(after, begin))
        return done


def _size_up(bucket: Bucket) -> int:
    return sum(piece.numel for piece in bucket.stepped_pieces()) * bucket.shadow.element_size()
