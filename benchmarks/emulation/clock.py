"""Keeps virtual time: events in order, and completions that move the clock on while a caller waits for them."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from superoffload import _native

Action = Callable[[], None]


class StalledError(AssertionError):
    """Reports a wait for what nothing will ever finish; in real time it would hang."""


class VirtualClock:
    """Counts seconds that pass only during a wait; simultaneous events happen in the order in which they were made."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Action]] = []
        self._made = 0

    def at(self, when: float, action: Action) -> None:
        """Schedules ``action`` for that moment, or now if it has passed."""
        self._made += 1
        heapq.heappush(self._events, (max(when, self.now), self._made, action))

    def advance(self, seconds: float) -> None:
        """Lets the caller compute for this long; everything due in that time happens."""
        until = self.now + seconds
        while self._events and self._events[0][0] <= until:
            self._next()
        self.now = until

    def wait_until(self, done: Callable[[], bool]) -> None:
        while not done():
            if not self._events:
                raise StalledError(f"at {self.now:.9f} s a caller waits for what nothing will ever finish")
            self._next()

    def run_dry(self) -> None:
        """Advances until no event is left."""
        while self._events:
            self._next()

    def _next(self) -> None:
        self.now, _, action = heapq.heappop(self._events)
        action()

    def seconds(self) -> float:
        """Returns the time, for ``EngineOptions.clock``."""
        return self.now


class VirtualCompletion(_native.Completion):
    """Completes on a virtual clock; waiting for it makes time pass, unlike the native one."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock
        self._done = False
        self._error = ""
        self._then: list[Action] = []
        self.times = (0.0, 0.0)

    def done(self) -> bool:
        return self._done

    def wait(self, timeout_seconds: float = -1.0) -> bool:
        self._clock.wait_until(self.done)
        if self._error:
            raise RuntimeError(self._error)
        return True

    def finish(self) -> None:
        self._end("")

    def fail(self, error: str) -> None:
        self._end(error)

    def _end(self, error: str) -> None:
        if self._done:
            return
        self._done, self._error = True, error
        actions, self._then = self._then, []
        for action in actions:
            action()

    def then(self, action: Action) -> None:
        """Calls ``action`` once this is done."""
        if self._done:
            action()
        else:
            self._then.append(action)

    @property
    def error(self) -> str:
        return self._error

    @property
    def began(self) -> float:
        return self.times[0]

    @property
    def ended(self) -> float:
        return self.times[1]


def when_done(completion: _native.Completion | None, action: Action) -> None:
    """Calls ``action`` once it is done; native completions must be done already: nothing virtual could finish them."""
    if isinstance(completion, VirtualCompletion):
        completion.then(action)
        return
    if completion is not None and not completion.done():
        raise StalledError("a native completion that is not done, under a virtual clock")
    action()
