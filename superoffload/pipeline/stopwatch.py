"""How long the model computes: forward and backward, without the time that the optimizer held them up."""

from __future__ import annotations

from collections.abc import Callable

from superoffload import _native

Times = tuple[float, float]


class Stopwatch:
    """One step after the other. ``exposed``: the seconds for which the training thread has waited for us so far."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ended: Times | None = None  # when the last step was over, and what was exposed by then
        self._began: Times | None = None  # likewise for the first gradient of this step
        self._first: _native.Completion | None = None
        self._last: _native.Completion | None = None
        self._packed = 0

    def gradient(self, exposed: float) -> None:
        """A gradient arrives in backward."""
        if self._began is None:
            self._began = self._clock(), exposed

    def packed(self, arrival: _native.Completion) -> None:
        """A bucket's gradient is on its way."""
        self._first = self._first or arrival
        self._last = arrival
        self._packed += 1

    def computed(self, deciding: float, exposed: float) -> tuple[float, float] | None:
        """Seconds of forward and backward of this step; None where there was no step before, or no backward.

        ``deciding``: when its end was asked for, ``exposed`` as of then. All gradients have arrived now: where a device
        is behind the training thread, its arrivals say when it really computed.
        """
        if self._ended is None or self._began is None or self._packed == 0:
            return None
        first, last = self._began[0], deciding
        forward = first - self._ended[0] - (self._began[1] - self._ended[1])
        backward = last - first - (exposed - self._began[1])
        late_first, late_last = (
            max(0.0, arrival.ended - then) if arrival is not None and arrival.ended > 0 else 0.0
            for arrival, then in ((self._first, first), (self._last, last))
        )
        forward, backward = forward + late_first, backward + late_last - late_first
        # The first of them came after its share of backward.
        share = max(0.0, backward) / (self._packed - 1) if self._packed > 1 else max(0.0, forward) * 2 / 3
        return max(0.0, forward - share), max(0.0, backward) + share

    def step_ended(self, exposed: float) -> None:
        """Forward may begin."""
        self._ended = self._clock(), exposed
        self.reset()

    def reset(self) -> None:
        """The gradients of this step are gone."""
        self._began = self._first = self._last = None
        self._packed = 0
