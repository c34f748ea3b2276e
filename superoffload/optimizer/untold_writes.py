"""When parameters' bits are compared for writes that no version counter shows, and the one warning about such a write.

In host memory that is every step: it takes as long as reading the parameters twice. On a device it takes two launches
and a wait, so there the first steps are compared, then every 16th, and once such a write was found all.
"""

from __future__ import annotations

from collections.abc import Collection

from superoffload.optimizer.advice import Advice
from superoffload.optimizer.watched import Tracked

FIRST_STEPS = 3
EVERY = 16


class UntoldWrites:
    """One optimizer's: ``step_ended()`` after each step, ``found()`` for what was noticed by its bits alone."""

    def __init__(self, advice: Advice) -> None:
        self._advice = advice
        self._steps = 0
        self._found = False

    def step_ended(self) -> None:
        self._steps += 1

    @property
    def on_device(self) -> bool:
        """Whether the coming step compares what is on a device, too."""
        return self._found or self._steps < FIRST_STEPS or (self._steps + 1) % EVERY == 0

    def found(self, written: Collection[Tracked]) -> None:
        """Keeps what is to be said of it, once."""
        if not written or self._found:
            return
        self._found = True
        one = min(written, key=lambda tracked: tracked.shard.index)
        others = f" and {len(written) - 1} more" if len(written) > 1 else ""
        place = "" if one.param.device.type == "cpu" else _on_device(self._steps)
        self._advice.keep(
            f"{one.shard.name}{others} changed without autograd's version counters showing it, as with "
            f"writes through .data or NumPy. The new values count from this step on{place}. Write to the parameter "
            "itself under torch.no_grad(), or call refresh_masters() after such writes: then they are known at once, "
            "and what was stepped during backward need not be undone"
        )


def _on_device(steps: int) -> str:
    if steps < FIRST_STEPS:
        return ""  # every step was compared so far
    return (
        f"; bits on a device are compared in the first {FIRST_STEPS} steps and every {EVERY}th after them, so earlier "
        "ones may have been overwritten. From now on every step is compared"
    )
