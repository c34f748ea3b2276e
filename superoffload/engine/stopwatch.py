"""A stopwatch times forward and backward, without the time for which the optimizer held them up."""

from __future__ import annotations

from collections.abc import Callable

from superoffload import _native


class Stopwatch:
    """Times the model's computation, step by step."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: float | None = None  # when the current forward or backward began
        self.held_up_so_far = 0.0  # seconds since then in which the optimizer used the training thread
        self._forward: float | None = None  # seconds of forward, once the first gradient has arrived
        self._first: _native.Completion | None = None
        self._last: _native.Completion | None = None
        self._first_at = 0.0
        self._packed = 0

    def held_up(self, began: float, ended: float) -> None:
        """Notes that the optimizer used the training thread, or had it wait, from ``began`` to ``ended``."""
        if self._since is not None:
            self.held_up_so_far += max(0.0, ended - max(began, self._since))

    def step_ended(self) -> None:
        """Starts timing the next forward."""
        self._start()
        self._forward = self._first = self._last = None
        self._packed = 0

    def gradient(self) -> None:
        """Notes that a gradient arrives in backward: the first one ends forward."""
        if self._since is not None and self._forward is None:
            self._first_at = self._clock()
            self._forward = self._first_at - self._since - self.held_up_so_far
            self._start()

    def packed(self, arrival: _native.Completion) -> None:
        """Notes the arrival of a bucket's gradient in host memory, which may still be to come."""
        self._first = self._first or arrival
        self._last = arrival
        self._packed += 1

    def computed(self, deciding: float, held_up: float) -> tuple[float, float] | None:
        """Returns the seconds of forward and backward of this step; None without a step before, or without backward.

        ``deciding``: when the end of the step was asked for; ``held_up``: ``held_up_so_far`` then. All gradients have
        arrived. Where a device is behind the training thread, the arrivals show when it really computed.
        """
        if self._since is None or self._forward is None or self._packed == 0:
            return None
        late_first, late_last = _after(self._first, self._first_at), _after(self._last, deciding)
        forward = self._forward + late_first
        backward = deciding - self._since - held_up + late_last - late_first
        # The first bucket arrived after its share of backward, which counts as forward so far.
        share = max(0.0, backward) / (self._packed - 1) if self._packed > 1 else max(0.0, forward) * 2 / 3
        return max(0.0, forward - share), max(0.0, backward) + share

    def _start(self) -> None:
        self._since, self.held_up_so_far = self._clock(), 0.0


def _after(arrival: _native.Completion | None, moment: float) -> float:
    """Returns the seconds by which a gradient arrived after ``moment``."""
    return max(0.0, arrival.ended - moment) if arrival is not None and arrival.ended > 0 else 0.0
