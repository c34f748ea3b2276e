"""Users are told once what a step, or a row of steps, shows.

Warnings wait until the step has ended, since one raises where warnings are errors. A row of steps without a gradient,
skipped, or clipped by the program is correct, as in torch, but shows only as a loss that does not fall, or no overlap.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from superoffload.engine.bucket import Bucket, BucketState, Shard
from superoffload.errors import warn

STEPS_IN_A_ROW = 2


class Advice:
    """Keeps the warnings of one optimizer until ``tell()``."""

    def __init__(self) -> None:
        self._messages: list[str] = []
        self._said_of_held = False

    def keep(self, message: str) -> None:
        self._messages.append(message)

    def keep_of_held(self, shard: str | None) -> None:
        """Warns once where a program holds state of a shard, so that it was not speculated; None: it holds none."""
        if shard is not None and not self._said_of_held:
            self._said_of_held = True
            self.keep(
                f"the program keeps a tensor of optimizer.state of {shard} and may read or write it at any time, so "
                "its part of the model is not stepped during backward. The result is right. It is faster to read "
                "optimizer.state where the values are needed, and to keep copies (clone())"
            )

    def tell(self) -> None:
        """Warns of all that was kept."""
        while self._messages:
            warn(self._messages.pop(0))


class EditAdvice:
    """Tells once of gradients that change after backward, where two steps in a row lost all that was stepped early.

    Counts undone buckets: ``begin()`` before gradients are compared, ``edited()`` per gradient, ``end()`` after.
    """

    def __init__(self, advice: Advice) -> None:
        self._advice = advice
        self._speculated: list[Bucket] = []
        self._edited: set[int] = set()
        self._in_a_row = 0
        self._said = False

    def begin(self, buckets: Iterable[Bucket]) -> None:
        if not self._said:
            self._speculated = [bucket for bucket in buckets if bucket.state is BucketState.SPECULATED]
            self._edited.clear()

    def edited(self, shard: Shard) -> None:
        """Notes that speculation with this gradient is undone, since it was changed after backward."""
        self._edited.add(shard.index)

    def end(self) -> None:
        if self._said:
            return
        lost = [bucket for bucket in self._speculated if any(p.shard.index in self._edited for p in bucket.pieces)]
        everything = bool(lost) and len(lost) == len(self._speculated)
        self._in_a_row = self._in_a_row + 1 if everything else 0
        self._speculated = []
        if self._in_a_row == STEPS_IN_A_ROW:
            self._said = True
            self._advice.keep(_message(len(lost)))


def _message(buckets: int) -> str:
    undone = "the bucket that was" if buckets == 1 else f"all {buckets} buckets that were"
    return (
        f"gradients changed between backward and step() in {STEPS_IN_A_ROW} steps in a row, so {undone} "
        "stepped during backward had to be undone and stepped again. The result is right, but nothing is hidden behind "
        "backward. If you clip by hand (torch.nn.utils.clip_grad_norm_, GradScaler.unscale_), remove that: "
        "superoffload.AdamW(max_grad_norm=) clips, and optimizer.grad_norm is then the norm before clipping. Make "
        "other changes in a hook (parameter.register_hook), which runs earlier; where that is impossible, "
        "speculation='never' avoids the undo"
    )


WITHOUT_GRADIENTS = 3  # steps before the first gradient
SKIPPED = 20  # in a row: a loss scale of 65536 that is halved as often is below 0.1
CLIPPED_BEFORE = 5  # in a row: the norm is the threshold itself, up to rounding

NOTHING_EARLY = (
    "gradients of parameters that every rank has in full are read at step(), so nothing is stepped during backward. "
    "The result is right. A DistributedDataParallel with all of them is followed, unless it has another communication "
    "hook, two have them, or accumulate_dtype='fp32' or keep_grads=False is given. Where your own code reduces "
    "gradients, speculation='never' ends this warning"
)


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
