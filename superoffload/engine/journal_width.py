"""How wide a bucket's journal codes are, and when its journal is left out. Changes speed, never results."""

from __future__ import annotations

from superoffload import _native

ESCAPE_BYTES = 6  # an old word and its index
_WIDE_STEP = 2  # exp_avg_sq changes by its own size: a quarter of the one-byte codes would not fit
_LONGEST_HOLD = 16


class JournalWidth:
    """One bucket's, chosen for each speculation from the last one."""

    def __init__(self) -> None:
        self.width = 1
        self._wide_until = 0
        self._hold = 0
        self._overflows = 0

    def choose(self, work: _native.BucketWork, next_step: int) -> int | None:
        """Bytes per code for the next speculation; None: leave the bucket out, its journal overflowed lately."""
        if self._hold > 0:
            self._hold -= 1
            return None
        width = self.width
        if next_step == _WIDE_STEP or self._wide_until >= next_step:
            width = 2
        self.width = width if work.width_fits(width) else 1
        return self.width

    def learn_from_overflow(self, work: _native.BucketWork, next_step: int) -> None:
        """One-byte codes did not fit: two bytes next time. Two-byte codes: leave the bucket out for a while."""
        if self.width == 1 and work.width_fits(2):
            self.width = 2
            self._wide_until = next_step + 1
            return
        self._overflows += 1
        self._hold = min(2**self._overflows, _LONGEST_HOLD)

    def learn_from_use(self, use: _native.JournalUse, numel: int, capacity: int) -> None:
        """After a journal that fitted: the cheaper width for the next one, with room to spare in the arena."""
        self._overflows = 0
        narrow_escapes = ESCAPE_BYTES * use.narrow_escapes
        narrow = numel + narrow_escapes
        wide = 2 * numel + ESCAPE_BYTES * sum(use.escapes) if self.width == 2 else 2 * numel
        fits = numel + 1.5 * narrow_escapes < capacity
        self.width = 1 if fits and narrow <= wide else 2
