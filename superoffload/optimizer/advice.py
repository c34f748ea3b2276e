"""Warnings about a step wait until it has ended, since a warning raises where warnings are errors."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from superoffload.engine.bucket import Bucket, BucketState, Shard

STEPS_IN_A_ROW = 2


class Advice:
    """Keeps the warnings of one optimizer until ``tell()``."""

    def __init__(self) -> None:
        self._messages: list[str] = []

    def keep(self, message: str) -> None:
        self._messages.append(f"superoffload: {message}")

    def tell(self) -> None:
        """Warns with the line that called ``step()``, which is above two wrappers of torch."""
        while self._messages:
            warnings.warn(self._messages.pop(0), RuntimeWarning, stacklevel=5)


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
        "backward. If you clip by hand (torch.nn.utils.clip_grad_norm_, GradScaler.unscale_): remove that and pass "
        "max_grad_norm= to superoffload.AdamW; optimizer.grad_norm is then the norm before clipping. If a "
        "DistributedDataParallel reduces gradients, pass it as model=. Make other changes in a hook "
        "(parameter.register_hook), which runs earlier; where that is impossible, speculation='never' avoids the undo"
    )
