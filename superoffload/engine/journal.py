"""Undo journals: the bytes that are reserved for them, and whether their codes have one byte or two.

The planner and doctor import this without loading torch.

All buckets share the reserved memory (csrc/runtime/journal_memory.h), so that it need not be as large as each bucket's
worst step. Steps that need more room than there is leave their last buckets out of speculation, or undo them early.

[Note: why the journal is enough] A step estimates the old values from the new ones and the packed gradient, and writes
by how many units in the last place each estimate misses. Undo makes the same estimate from the same bits and adds that.
What no code can hold is written whole, as an escape; without room for escapes the step is undone while all is known.
"""

from __future__ import annotations

from superoffload import _native

# One-byte codes and as much for escapes; or the old upper halves of split masters between publish and settle.
JOURNAL_BYTES_PER_PARAM = 2.0

# What was used beyond this goes back to the system after some steps that did without: training that has settled uses
# 1.1 to 1.3.
KEPT_JOURNAL_BYTES_PER_PARAM = 1.5

# A bucket has a little more, because escapes average out less over few parameters.
_JOURNAL_BYTES_PER_BUCKET = 1024

# Offsets in shared memory are 32-bit numbers of 4-byte words. More buckets than that share several pieces.
LARGEST_JOURNAL_MEMORY = 1 << 34

_ESCAPE_BYTES = 6  # of a journal: an old word and its index
_WIDE_STEP = 2  # exp_avg_sq changes by its own size: a quarter of the one-byte codes would not fit
_LONGEST_HOLD = 16


def reserved_bytes(padded: int) -> int:
    """Returns the bytes that a bucket of ``padded`` elements, alignment included, adds to the journals' memory."""
    return int(JOURNAL_BYTES_PER_PARAM * padded) + _JOURNAL_BYTES_PER_BUCKET


def kept_bytes(reserved: int) -> int:
    """Returns how many of ``reserved`` bytes are kept after steps that needed fewer."""
    return int(reserved * KEPT_JOURNAL_BYTES_PER_PARAM / JOURNAL_BYTES_PER_PARAM)


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
