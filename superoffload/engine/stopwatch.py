"""How long the model computes: forward and backward, without the time that the optimizer held them up."""

from __future__ import annotations

from collections.abc import Callable

from superoffload import _native


class Stopwatch:
    """One step after the other."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: float | None = None  # when what is measured now began: forward, or backward
        self.held_up_so_far = 0.0  # seconds since then in which the training thread was ours
        self._forward: float | None = None  # of this step, once its first gradient is there
        self._first: _native.Completion | None = None
        self._last: _native.Completion | None = None
        self._first_at = 0.0
        self._packed = 0

    def held_up(self, began: float, ended: float) -> None:
        """The training thread waited for us, or worked for us."""
        if self._since is not None:
            self.held_up_so_far += max(0.0, ended - max(began, self._since))

    def step_ended(self) -> None:
        """Forward may begin."""
        self._start()
        self._forward = self._first = self._last = None
        self._packed = 0

    def gradient(self) -> None:
        """A gradient arrives in backward."""
        if self._since is not None and self._forward is None:
            self._first_at = self._clock()
            self._forward = self._first_at - self._since - self.held_up_so_far
            self._start()

    def packed(self, arrival: _native.Completion) -> None:
        """A bucket's gradient is on its way."""
        self._first = self._first or arrival
        self._last = arrival
        self._packed += 1

    def computed(self, deciding: float, held_up: float) -> tuple[float, float] | None:
        """Seconds of forward and backward of this step; None where there was no step before, or no backward.

        ``deciding``: when its end was asked for; ``held_up``: ``held_up_so_far`` then. All gradients have arrived now:
        where a device is behind the training thread, its arrivals say when it really computed.
        """
        if self._since is None or self._forward is None or self._packed == 0:
            return None
        late_first, late_last = _after(self._first, self._first_at), _after(self._last, deciding)
        forward = self._forward + late_first
        backward = deciding - self._since - held_up + late_last - late_first
        # The first of them came after its share of backward.
        share = max(0.0, backward) / (self._packed - 1) if self._packed > 1 else max(0.0, forward) * 2 / 3
        return max(0.0, forward - share), max(0.0, backward) + share

    def _start(self) -> None:
        self._since, self.held_up_so_far = self._clock(), 0.0


def _after(arrival: _native.Completion | None, moment: float) -> float:
    """Seconds by which a gradient arrived after it was handed over."""
    return max(0.0, arrival.ended - moment) if arrival is not None and arrival.ended > 0 else 0.0
