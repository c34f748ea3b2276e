"""How wide a bucket's journal codes are, and when its journal is left out. Changes speed, never results."""

from __future__ import annotations

from superoffload import _native
from superoffload.bucket import Bucket

ESCAPE_BYTES = 6  # an old word and its index
_WIDE_STEP = 2  # exp_avg_sq changes by its own size: a quarter of the one-byte codes would not fit
_LONGEST_HOLD = 16


def choose_width(bucket: Bucket, next_step: int) -> int | None:
    """Bytes per code for the next speculation of ``bucket``; None: leave it out, its journal overflowed lately."""
    if bucket.hold > 0:
        bucket.hold -= 1
        return None
    width = bucket.width
    if next_step == _WIDE_STEP or bucket.wide_until >= next_step:
        width = 2
    return width if bucket.work.width_fits(width) else 1


def learn_from_overflow(bucket: Bucket, width: int, next_step: int) -> None:
    """One-byte codes that did not fit: two bytes next time. No wider ones: leave the bucket out for a while."""
    if width == 1 and bucket.work.width_fits(2):
        bucket.width = 2
        bucket.wide_until = next_step + 1
        return
    bucket.overflows += 1
    bucket.hold = min(2**bucket.overflows, _LONGEST_HOLD)


def learn_from_journal(bucket: Bucket, width: int, use: _native.JournalUse) -> None:
    """After a journal that fitted: the cheaper width for the next one, with room to spare in the arena."""
    bucket.overflows = 0
    narrow_escapes = ESCAPE_BYTES * use.narrow_escapes
    narrow = bucket.numel + narrow_escapes
    wide = 2 * bucket.numel + ESCAPE_BYTES * sum(use.escapes) if width == 2 else 2 * bucket.numel
    fits = bucket.numel + 1.5 * narrow_escapes < bucket.work.journal_capacity
    bucket.width = 1 if fits and narrow <= wide else 2
