"""How wide the codes of a journal are. (Who finds room, and that it comes back: tests/simulator, tests/fuzz.)"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from superoffload.engine.journal import JournalWidth


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
