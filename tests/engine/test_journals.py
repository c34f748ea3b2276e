"""The journals of all buckets share memory: how wide codes are, who finds room, and that it all comes back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from superoffload.engine.journal import JournalWidth
from superoffload.errors import WorkerError
from tests.support.engine_rig import Rig, Settings, rig

FOUR = Settings([[4096] * 4], bucket_numel=4096)  # four buckets


def step(made: Rig) -> None:
    made.step_both(made.backward())
    made.check()


@pytest.mark.parametrize("width", [1, 2])
def test_a_journal_without_room_is_undone_at_once_and_stepped_later(width: int) -> None:
    with rig(Settings([[4096]], bucket_numel=4096), width=width, arena=0.0) as made:
        for _ in range(3):
            step(made)
        stats = made.engine.stats()
        assert [stats[f"buckets_{fate}"] for fate in ("speculated", "undone", "stepped")] == [3, 3, 3]
        assert stats["journal_overflows"] == 3


def test_buckets_share_the_memory_of_their_journals() -> None:
    """The escapes of the first take the room of the last, which is left out, or undone where its escapes find none."""
    with rig(FOUR, arena=-0.75) as made:  # 1.25 bytes per parameter
        for _ in range(8):
            step(made)
        stats = made.engine.stats()
        assert 8 < stats["buckets_committed"] == stats["buckets_speculated"] - stats["buckets_undone"] < 8 * 4
        assert stats["buckets_stepped"] == 8 * 4 - stats["buckets_committed"]
        assert 4 * 4096 < stats["journal_reserved_bytes"] <= 1.25 * 4 * 4096


def test_a_failed_speculation_gives_its_room_back() -> None:
    """Else the journals would not begin at the front again, and later steps would find no room."""
    with rig(FOUR, width=1, arena=0.25) as made:
        made.engine.pool.inject_fault(2, "a bit fell over")
        made.backward()
        verdict = made.engine.decide(unscale=1.0, max_grad_norm=None)
        with pytest.raises(WorkerError, match="a bit fell over"):
            made.engine.apply(verdict)
        before = made.engine.stats()["buckets_committed"]
        step(made)
        assert made.engine.stats()["buckets_committed"] - before == 4


def choose(chooser: JournalWidth, next_step: int, *widths: int) -> int | None:
    """For a bucket that finds room for codes of these widths."""
    work: Any = SimpleNamespace(take_journal=lambda width: width in widths)
    return chooser.choose(work, next_step)


def test_codes_have_the_width_that_takes_fewer_bytes() -> None:
    """An escape takes 6 bytes: 167 of 1,000 parameters take more than a second byte of all. Only the second step, whose
    moments change most, begins with wide ones."""
    for step, widths, chosen in ((1, (1, 2), 1), (2, (1, 2), 2), (2, (1,), 1), (2, (), None), (3, (), None)):
        assert choose(JournalWidth(), step, *widths) == chosen
    for step, narrow, wide, width in ((5, 166, 0, 1), (5, 167, 0, 2), (2, 166, 0, 1), (2, 200, 0, 2), (2, 200, 34, 1)):
        chooser = JournalWidth()
        choose(chooser, step, 1, 2)
        use: Any = SimpleNamespace(narrow_escapes=narrow, escapes=(wide if step == 2 else narrow, 0, 0))
        chooser.learn_from_use(use, 1000)
        assert choose(chooser, 5, 1, 2) == width
    chooser = JournalWidth()
    choose(chooser, 2, 1, 2)
    chooser.learn_from_overflow(2)
    assert choose(chooser, 3, 1, 2) == 1, "an overflow in the second step says nothing of the third"
    chooser.learn_from_overflow(5)
    for held in (2, 4, 8, 16, 16):
        assert choose(chooser, 6, 1, 2) == 2
        chooser.learn_from_overflow(6)
        assert [choose(chooser, 7, 1, 2) for _ in range(held)] == [None] * held
