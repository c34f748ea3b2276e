"""Each bucket chooses the width of its journal codes, or leaves speculation out. That changes speed, never results."""

from __future__ import annotations

from superoffload import _native

ESCAPE_BYTES = 6  # an old word and its index
_WIDE_STEP = 2  # here exp_avg_sq about doubles: a quarter of the one-byte codes would not fit
_LONGEST_HOLD = 16


class JournalWidth:
    """Chooses the width for a bucket's next speculation from its last one."""

    def __init__(self) -> None:
        self.width = 1
        self._wide_until = 0
        self._hold = 0
        self._overflows = 0

    def choose(self, work: _native.BucketWork, next_step: int) -> int | None:
        """Returns the bytes per code of the next speculation; None: leave it out, the journal overflowed lately."""
        if self._hold > 0:
            self._hold -= 1
            return None
        width = self.width
        if next_step == _WIDE_STEP or self._wide_until >= next_step:
            width = 2
        self.width = width if work.width_fits(width) else 1
        return self.width

    def learn_from_overflow(self, work: _native.BucketWork, next_step: int) -> None:
        """Goes from one-byte to two-byte codes, or, where two bytes overflowed, leaves the bucket out for a while."""
        if self.width == 1 and work.width_fits(2):
            self.width = 2
            self._wide_until = next_step + 1
            return
        self._overflows += 1
        self._hold = min(2**self._overflows, _LONGEST_HOLD)

    def learn_from_use(self, use: _native.JournalUse, numel: int, capacity: int) -> None:
        """Chooses, after a journal that fitted, the cheaper width that leaves room to spare in the arena."""
        self._overflows = 0
        narrow_escapes = ESCAPE_BYTES * use.narrow_escapes
        narrow = numel + narrow_escapes
        wide = 2 * numel + ESCAPE_BYTES * sum(use.escapes) if self.width == 2 else 2 * numel
        fits = numel + 1.5 * narrow_escapes < capacity
        self.width = 1 if fits and narrow <= wide else 2
