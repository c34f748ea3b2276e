"""Accelerate: which backward is the boundary, as its ``accumulate()`` says, and Hugging Face's Trainer through it."""

from __future__ import annotations

import sys
from typing import Any


class Window:
    """Knows whether Accelerate accumulates gradients now, where it is used at all.

    ``GradientState`` is one for the whole process. Where it says so of another model, nothing is lost but the overlap.
    """

    def __init__(self) -> None:
        self._state: Any = None

    def more_to_come(self) -> bool:
        """Whether another backward follows before ``step()``."""
        if self._state is None:
            module = sys.modules.get("accelerate.state")  # without loading it
            if module is None or not hasattr(module, "GradientState"):
                return False
            self._state = module.GradientState()
        return not getattr(self._state, "sync_gradients", True)
