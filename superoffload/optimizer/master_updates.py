"""Masters follow the parameters that users write."""

from __future__ import annotations

from superoffload.engine.engine import Engine
from superoffload.optimizer.bit_compare_interval import BitCompareInterval
from superoffload.optimizer.tracked_param import FoundEdits, TrackedParam


class MasterUpdates:
    """Has masters follow parameters that were written."""

    def __init__(self, engine: Engine, compare_interval: BitCompareInterval) -> None:
        self._engine = engine
        self._compare_interval = compare_interval

    def follow(self, tracked: TrackedParam) -> None:
        tracked.check_still_fits()
        self._engine.restore(tracked.shard)  # or an undo would put back the old master
        self._engine.snapshots.protect([tracked.shard])
        tracked.refresh_master()

    def follow_all(self, found: FoundEdits) -> None:
        self._compare_interval.found(found.unversioned)
        for tracked in found.written:
            self.follow(tracked)
