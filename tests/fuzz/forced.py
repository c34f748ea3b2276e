"""What a program's settings force on the run that speculates: its schedule, journals of odd sizes, slow disks.

On the host link the schedule never chooses two phases by itself: there the model computes with the same processors that
step buckets, so nothing would be hidden (``Situation.apart``). Random programs meet them only where they are forced to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from typing import Any
from unittest import mock

from superoffload.engine.journal import JournalWidth
from superoffload.engine.options import EngineOptions
from superoffload.engine.schedule import Schedule, Situation
from superoffload.engine.snapshot import ShardState, Snapshot
from tests.fuzz.program import Settings

_READ_ALL = Snapshot.read_all
_READING_SECONDS = 0.001  # per shard, so that training goes on while a save is under way
SHARES = (0.0, 0.3, 0.5, 1.0)


class MixedSchedule(Schedule):
    """Any bucket of any step may be speculated, stepped in one pass or in two phases."""

    def __init__(self, seed: int) -> None:
        super().__init__("always")
        self._random = Random(seed)
        self._speculates = 1.0  # the chance of a bucket of this step

    def should_speculate(self, packed: float = 0.0) -> bool:
        return self._random.random() < self._speculates

    def share_to_publish(self, situation: Situation) -> float:
        self._speculates = self._random.choice(SHARES)  # of the step that comes
        return self._random.choice(SHARES)


def _read_slowly(snapshot: Snapshot, read: Callable[[int, ShardState], None]) -> None:
    def later(index: int, state: ShardState) -> None:
        time.sleep(_READING_SECONDS)
        read(index, state)

    _READ_ALL(snapshot, later)


@contextmanager
def forced(settings: Settings) -> Iterator[None]:
    """Around the construction and the use of an optimizer."""
    with ExitStack() as stack:
        if settings.schedule == "mixed":
            mixed = MixedSchedule(settings.schedule_seed)
            stack.enter_context(mock.patch.object(EngineOptions, "make_schedule", lambda options: mixed))
        width, room = settings.journal_width, settings.journal_room
        if width is not None:  # all codes have this many bytes

            def choose(chooser: JournalWidth, *_: Any) -> int:
                chooser.width = width
                return width

            stack.enter_context(mock.patch.object(JournalWidth, "choose", choose))
        if room is not None:
            share = (width or 2) + room
            size = mock.patch("superoffload.engine.layout.reserved_bytes", lambda numel: int(share * numel))
            stack.enter_context(size)
        stack.enter_context(mock.patch.object(Snapshot, "read_all", _read_slowly))
        yield
