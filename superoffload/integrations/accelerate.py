"""Adapts Hugging Face Accelerate: its windows of accumulation, its wrapper around optimizers, its placement of state.

Nothing here loads Accelerate. A program that uses it has done that.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from superoffload.optimizer.advice import Advice
from superoffload.optimizer.frameworks import Framework


class AccelerateWindow:
    """Knows whether Accelerate, if it is used, accumulates gradients now, for one optimizer.

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


class Accelerate(Framework):
    def window(self) -> AccelerateWindow:
        return AccelerateWindow()

    def is_copying_state(self) -> bool:
        """Returns whether this is called by ``AcceleratedOptimizer``'s constructor, so by ``Accelerator.prepare()``.

        It has all state copied by ``state_dict()``, copies it to the device, where it may not fit, and loads it."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__") != "accelerate.optimizer":
            frame = frame.f_back
        return frame is not None and frame.f_code.co_name == "__init__"


ADAPTER = Accelerate()
