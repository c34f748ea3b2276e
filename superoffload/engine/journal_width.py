"""The codes of a bucket's journal have one byte or two."""

from __future__ import annotations

from superoffload import _native

_ESCAPE_BYTES = 6  # of a journal: an old word and its index
_WIDE_STEP = 2  # exp_avg_sq changes by its own size: a quarter of the one-byte codes would not fit
_LONGEST_HOLD = 16


class JournalWidth:
    """Chooses how wide the codes of a bucket's journal are, each time by the last speculation. No result changes."""

    def __init__(self) -> None:
        self.width = 1
        self._wide_until = 0
        self._hold = 0
        self._overflows = 0

    def choose(self, work: _native.BucketWork, next_step: int) -> int | None:
        """Takes room for codes and returns the bytes of each; None: there is none, or the journal overflowed lately."""
        if self._hold > 0:
            self._hold -= 1
            return None
        wide = self.width == 2 or next_step == _WIDE_STEP or self._wide_until >= next_step
        for width in (2, 1) if wide else (1,):
            if work.take_journal(width):
                self.width = width
                return width
        return None

    def learn_from_overflow(self, next_step: int) -> None:
        """Goes from one-byte to two-byte codes, or, where two bytes overflowed, leaves the bucket out for a while."""
        if next_step == _WIDE_STEP:
            self.width = 1  # later steps need less
        elif self.width == 1:
            self.width, self._wide_until = 2, next_step + 1
        else:
            self._overflows += 1
            self._hold = min(2**self._overflows, _LONGEST_HOLD)

    def learn_from_use(self, use: _native.JournalUse, numel: int) -> None:
        """Chooses, after a journal that fitted, the width that takes fewer bytes."""
        self._overflows = 0
        narrow = numel + _ESCAPE_BYTES * use.narrow_escapes
        wide = 2 * numel + (_ESCAPE_BYTES * sum(use.escapes) if self.width == 2 else 0)
        self.width = 1 if narrow <= wide else 2
