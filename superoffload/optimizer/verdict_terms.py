"""A verdict depends on gradients, on the norm to clip to and on the loss scale; the last two are kept here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from superoffload.engine.verdict import Verdict
from superoffload.errors import StateError, warn
from superoffload.host.numbers import as_float
from superoffload.optimizer.arguments import check_max_grad_norm

_NAMED = 8  # a warning names at most so many ranks


class LossScale(NamedTuple):
    """Holds the values that a ``torch.amp.GradScaler`` has set on an optimizer around its ``step()``.

    ``is_set``: a scaler has set them. ``grad_scale`` None: the user called ``unscale_()``. ``found_inf``: the scaler
    saw a NaN or an infinity, which may have been replaced since.
    """

    is_set: bool
    grad_scale: Any
    found_inf: Any

    @classmethod
    def on(cls, optimizer: Any) -> LossScale:
        scale = getattr(optimizer, "grad_scale", None)
        return cls(hasattr(optimizer, "grad_scale"), scale, getattr(optimizer, "found_inf", 0.0))

    @property
    def was_taken_out(self) -> bool:
        """Returns whether the user has unscaled all gradients, which version counters do not show."""
        return self.is_set and self.grad_scale is None

    @property
    def inverse(self) -> float:
        """Returns the factor that takes the loss scale out of gradients."""
        if self.grad_scale is None:
            return 1.0
        scale = as_float(self.grad_scale)
        return 1.0 / scale if scale != 0.0 else math.inf

    @property
    def saw_inf(self) -> bool:
        return as_float(self.found_inf) > 0


class VerdictTerms:
    """Keeps the terms of the next verdict, which speculation goes by, and what the last one was.

    ``unscale``: the factor that took the loss scale out in the last step; the next one is expected to have it again.
    """

    def __init__(self, max_grad_norm: float | None) -> None:
        self.max_grad_norm = check_max_grad_norm(max_grad_norm)
        self.unscale = 1.0
        self.last: Verdict | None = None  # of a step that had gradients
        self.step_was_skipped = False
        self._said_whose_norm = False

    @property
    def grad_norm(self) -> float:
        if self.last is None:
            raise StateError("grad_norm: there was no step() with gradients yet")
        return self.last.grad_norm

    def clip_to(self, max_grad_norm: float | None) -> None:
        self.max_grad_norm = check_max_grad_norm(max_grad_norm)

    def decided(self, verdict: Verdict) -> None:
        self.last = verdict
        self.step_was_skipped = verdict.found_inf

    def without_gradients(self) -> None:
        """Notes a step that had nothing to step."""
        self.step_was_skipped = False

    def say_whose_norm(self, ranks: Sequence[int], world: int) -> None:
        """Warns the user once that ``max_grad_norm`` counts only ``ranks``, not all of ``world``.

        Where ranks train parts of one model, as pipeline stages do, each part would get a clip coefficient of its own.
        Where they train models of their own, that is right.
        """
        others = world - len(ranks)
        if self._said_whose_norm or self.max_grad_norm is None or not others:
            return
        names = ", ".join(map(str, ranks[:_NAMED])) + (", ..." if len(ranks) > _NAMED else "")
        warn(
            f"max_grad_norm={self.max_grad_norm:g} clips by the norm of the gradients on rank {names} "
            f"alone ({len(ranks)} of {world}), as process_group= or replicated='local' says; the other {others} are "
            "clipped by norms of their own. If all of them train the same parameters, leave process_group and "
            "replicated out. If they train parts of one model, such as pipeline stages, leave them out too, and name "
            "parameters as in the whole model (model.named_parameters()). If they train models of their own, this is "
            "right, and a filter ends the warning: "
            "warnings.filterwarnings('ignore', message='superoffload: max_grad_norm')"
        )
        self._said_whose_norm = True
