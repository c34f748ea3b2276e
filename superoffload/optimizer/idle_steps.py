"""Users are told once what a row of steps shows: no gradient arrives, all are skipped, or all were clipped before.

Each is correct, as in torch, but the user only sees that the loss does not fall, or that nothing is hidden.
"""

from __future__ import annotations

import math

from superoffload.optimizer.advice import Advice

WITHOUT_GRADIENTS = 3  # steps before the first gradient
SKIPPED = 20  # in a row: a loss scale of 65536 that is halved as often is below 0.1
CLIPPED_BEFORE = 5  # in a row: the norm is the threshold itself, up to rounding


class IdleSteps:
    """Counts idle steps of one optimizer: it calls ``without_gradients()`` or ``decided()`` once per step."""

    def __init__(self, advice: Advice) -> None:
        self._advice = advice
        self._empty = 0
        self._skipped = 0
        self._clipped_before = 0
        self._said_skipped = False

    def without_gradients(self, parameters: int) -> None:
        if self._empty < 0:  # an optimizer that has trained may pause, as where two take turns
            return
        self._empty += 1
        if self._empty == WITHOUT_GRADIENTS:
            self._empty = -1
            self._advice.keep(
                f"step() was called {WITHOUT_GRADIENTS} times, and none of the {parameters} parameters "
                "has had a gradient yet, so nothing is trained. Call backward() before step(). If you do, the model "
                "has other parameters now than the optimizer was given: make the optimizer after the call that "
                "replaces them (fully_shard, loading, a conversion)"
            )

    def decided(self, *, skipped: bool, norm: float, max_grad_norm: float | None) -> None:
        self._empty = -1
        self._look_for_clipping_by_hand(norm, max_grad_norm)
        self._skipped = self._skipped + 1 if skipped else 0
        if self._skipped == SKIPPED and not self._said_skipped:
            self._said_skipped = True
            self._advice.keep(
                f"{SKIPPED} steps in a row were skipped, because gradients or their norm were NaN or "
                "infinite, so nothing is trained. Look at the loss of these steps: where it is finite and the model is "
                "float16, use torch.amp.GradScaler, or bfloat16; where it is not, look at the forward pass, the data "
                "and the learning rate"
            )

    def _look_for_clipping_by_hand(self, norm: float, max_grad_norm: float | None) -> None:
        if self._clipped_before < 0 or max_grad_norm is None:
            return
        self._clipped_before = self._clipped_before + 1 if math.isclose(norm, max_grad_norm, rel_tol=1e-3) else 0
        if self._clipped_before == CLIPPED_BEFORE:
            self._clipped_before = -1
            self._advice.keep(
                f"the norm of the gradients was max_grad_norm={max_grad_norm:g} itself in {CLIPPED_BEFORE} steps in a "
                "row, so the program clips them before step(). The result is right, but optimizer.grad_norm does not "
                "tell the norm before clipping, and nothing is hidden behind backward. Remove "
                "torch.nn.utils.clip_grad_norm_, or pass max_grad_norm=None"
            )
