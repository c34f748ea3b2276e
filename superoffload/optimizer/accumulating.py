"""A backward inside ``with optimizer.accumulate():``, or in a window of Accelerate, is not the boundary.

``accumulate_dtype="fp32"`` adds micro-batches up on the device, or in host memory if the device is too full:
``HostAccumulation`` decides which; ``Packer.add`` (superoffload/engine/inbox.py) adds in host memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ContextDecorator
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from superoffload.engine.engine import Engine
from superoffload.errors import warn
from superoffload.host.tensors import is_dtensor
from superoffload.optimizer.advice import Advice
from superoffload.optimizer.gradient_source import main_grad_of
from superoffload.optimizer.tracked_param import TrackedParam

if TYPE_CHECKING:
    from superoffload.optimizer.advice import Advice


class Window:
    """Knows whether Accelerate, if it is used, accumulates gradients now.

    A process has one ``GradientState``, and Accelerate calls no ``step()`` inside a window. So a step there shows that
    the window belongs to another loop, or was left unfinished. It is ignored until the next one begins.
    """

    def __init__(self) -> None:
        self._state: Any = None
        self._ignored = False
        self._said = False

    def more_to_come(self) -> bool:
        """Returns whether another backward follows before ``step()``."""
        is_open = self._is_open()
        self._ignored = self._ignored and is_open
        return is_open and not self._ignored

    def step_begins(self, advice: Advice) -> None:
        """Ignores the window from a ``step()`` inside it on, and warns of that once."""
        if self.more_to_come():
            self._ignored = True
            if self._said:
                return
            self._said = True
            advice.keep(
                "step() was called while Accelerate's GradientState says that gradients accumulate "
                "(sync_gradients=False), so nothing was stepped during backward. That window is ignored from now on; "
                "if it is this loop's, call step() and zero_grad() on what accelerator.prepare() returned"
            )

    def _is_open(self) -> bool:
        if self._state is None:
            module = sys.modules.get("accelerate.state")  # without loading it
            if module is None or not hasattr(module, "GradientState"):
                return False
            self._state = module.GradientState()
            _tell_of_skips(sys.modules.get("accelerate.optimizer"))
        return not getattr(self._state, "sync_gradients", True)


def is_placing_state() -> bool:
    """Returns whether this is called by ``AcceleratedOptimizer``'s constructor, and so by ``Accelerator.prepare()``.

    It has all state copied by ``state_dict()``, copies it to the device, where it may not fit, and loads it from there.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != "accelerate.optimizer":
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "__init__"


class _StepWasSkipped(property):
    """``AcceleratedOptimizer.step_was_skipped`` that knows of steps skipped without a gradient scaler of Accelerate's.

    Schedulers that Accelerate prepared, and Trainer, do not move after such a step.
    """

    def __init__(self, stock: property) -> None:
        def was_skipped(wrapper: Any) -> bool:
            return bool(getattr(wrapper.optimizer, "step_was_skipped", False) or stock.__get__(wrapper))

        super().__init__(was_skipped)


def _tell_of_skips(module: Any) -> None:
    wrapper: Any = getattr(module, "AcceleratedOptimizer", None)
    stock = getattr(wrapper, "step_was_skipped", None)
    if isinstance(stock, property) and not isinstance(stock, _StepWasSkipped):
        wrapper.step_was_skipped = _StepWasSkipped(stock)


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
        self._window = Window()

    def context(self) -> Accumulating:
        return Accumulating(self.contexts)

    @property
    def is_asked_for(self) -> bool:
        """Returns whether an ``accumulate()`` context is open."""
        return bool(self.contexts)

    def is_of_a_window(self) -> bool:
        """Returns whether a window of Accelerate is open."""
        return self._window.more_to_come()

    def step_begins(self, advice: Advice) -> None:
        self._window.step_begins(advice)


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
