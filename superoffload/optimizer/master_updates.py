"""Masters follow the parameters that users write. Bits show the writes that no version counter shows.

In host memory every step compares bits, which takes as long as reading the parameters twice. On a device it takes two
launches and a wait, so there the first steps compare, then every 16th, and all steps once such a write was found. The
first find leads to a warning.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from superoffload.engine.engine import Engine
from superoffload.optimizer.advice import Advice
from superoffload.optimizer.tracked_param import FoundEdits, TrackedParam

FIRST_STEPS = 3
EVERY = 16


@dataclass(eq=False, repr=False)
class MasterUpdates:
    """Has masters follow parameters that were written, and chooses the steps that compare bits on a device."""

    _engine: Engine
    _advice: Advice
    _steps: int = 0
    _found: bool = False

    def follow(self, tracked: TrackedParam) -> None:
        tracked.check_still_fits()
        self._engine.restore(tracked.shard)  # or an undo would put back the old master
        self._engine.snapshots.protect([tracked.shard])
        tracked.refresh_master()

    def follow_all(self, found: FoundEdits) -> None:
        self.advise_of(found.unversioned)
        for tracked in found.written:
            self.follow(tracked)

    def count_step(self) -> None:
        self._steps += 1

    @property
    def compares_on_device(self) -> bool:
        """Returns whether the next step also compares parameters on a device."""
        return self._found or self._steps < FIRST_STEPS or (self._steps + 1) % EVERY == 0

    def advise_of(self, written: Collection[TrackedParam]) -> None:
        """Keeps the warning about writes that only bits show, once."""
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
        return ""  # every step has compared so far
    return (
        f"; bits on a device are compared in the first {FIRST_STEPS} steps and every {EVERY}th after them, so earlier "
        "ones may have been overwritten. From now on every step is compared"
    )
