"""A backward inside ``with optimizer.accumulate():``, or in the window of a framework's loop, is not the boundary.

``accumulate_dtype="fp32"`` adds micro-batches up on the device, or in host memory if the device is too full:
``HostAccumulation`` decides which; ``Packer.add`` (superoffload/engine/inbox.py) adds in host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ContextDecorator
from types import TracebackType
from typing import Any, TypeVar

from superoffload.engine.engine import Engine
from superoffload.errors import warn
from superoffload.host.tensors import is_dtensor
from superoffload.optimizer.advice import Advice
from superoffload.optimizer.frameworks import windows
from superoffload.optimizer.gradient_source import main_grad_of
from superoffload.optimizer.tracked_param import TrackedParam

F = TypeVar("F", bound=Callable[..., Any])
_BYTES = 4  # of an element in fp32


class Accumulating(ContextDecorator):
    """Adds itself to ``contexts`` while it is entered: then no backward is the boundary. Contexts nest.

    One that is never entered does nothing, and warns when it is freed.
    """

    _entered = True  # no warning if an interrupt comes before the constructor

    def __init__(self, contexts: list[Accumulating]) -> None:
        self._contexts = contexts
        self._entered = False

    def __call__(self, function: F) -> F:
        self._entered = True
        return super().__call__(function)

    def __enter__(self) -> None:
        self._entered = True
        self._contexts.append(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._contexts.pop()

    def __del__(self) -> None:
        if not self._entered:
            warn(
                "accumulate() was called without `with`, which does nothing; write "
                "`with optimizer.accumulate():` around every backward() of a step but the last"
            )


class Accumulation:
    """Knows whether gradients accumulate now."""

    def __init__(self) -> None:
        self.contexts: list[Accumulating] = []  # open ones, of all threads
        self._windows = windows()

    def context(self) -> Accumulating:
        return Accumulating(self.contexts)

    @property
    def is_asked_for(self) -> bool:
        """Returns whether an ``accumulate()`` context is open."""
        return bool(self.contexts)

    def is_of_a_window(self) -> bool:
        """Returns whether a framework's loop says that more gradients will be added."""
        return any(window.more_to_come() for window in self._windows)

    def step_begins(self, advice: Advice) -> None:
        for window in self._windows:
            window.step_begins(advice)


class HostAccumulation:
    """Decides once per optimizer, at the first gradient that is part of a sum. The device has seen a forward by then,
    so its peak of memory is known."""

    def __init__(self, engine: Engine, *, wanted: bool) -> None:
        self._engine = engine
        self._chosen = None if wanted and engine.link.frees_gradients else False

    @property
    def is_disabled(self) -> bool:
        """Returns whether no gradient is added up in host memory."""
        return self._chosen is False

    def serve(self, tracked: TrackedParam) -> bool:
        """Returns whether this gradient is packed before the last pass, and further passes add to the packed one."""
        if self._chosen is False or tracked.param.grad is None or main_grad_of(tracked.param) is not None:
            return False
        if is_dtensor(tracked.param) or tracked.shard.resident:  # a resident one's packed gradient is on the device
            return False
        if self._chosen is None:
            numel = sum(shard.numel for shard in self._engine.shards if not shard.resident)
            self._chosen = not self._engine.link.has_room(_BYTES * numel)
        return self._chosen
