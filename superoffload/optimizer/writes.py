"""Masters follow the parameters that users write."""

from __future__ import annotations

from superoffload.engine.engine import Engine
from superoffload.optimizer.untold_writes import UntoldWrites
from superoffload.optimizer.watched import Noticed, Tracked


class Writes:
    """Has masters follow parameters that were written."""

    def __init__(self, engine: Engine, untold: UntoldWrites) -> None:
        self._engine = engine
        self._untold = untold

    def follow(self, tracked: Tracked) -> None:
        tracked.check_still_fits()
        self._engine.restore(tracked.shard)  # or an undo would put back the old master
        self._engine.snapshots.protect([tracked.shard])
        tracked.refresh_master()

    def follow_all(self, noticed: Noticed) -> None:
        self._untold.found(noticed.untold)
        for tracked in noticed.written:
            self.follow(tracked)
