"""How wide the codes of a journal are: chosen by the last speculation, within the room that is left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from superoffload.engine.journal_width import JournalWidth


class Room:
    """Stands for the work of a bucket of 1,000 parameters that finds room for codes of these widths."""

    def __init__(self, *widths: int) -> None:
        self.widths = widths
        self.asked: list[int] = []

    def take_journal(self, width: int) -> bool:
        self.asked.append(width)
        return width in self.widths


def choose(chooser: JournalWidth, room: Room, next_step: int) -> int | None:
    work: Any = room
    return chooser.choose(work, next_step)


@pytest.mark.parametrize(
    "step,widths,asked,chosen",
    [
        (1, (1, 2), [1], 1),
        (2, (1, 2), [2], 2),
        (2, (1,), [2, 1], 1),
        (2, (), [2, 1], None),
        (3, (), [1], None),
    ],
)
def test_only_the_second_step_begins_with_wide_codes(
    step: int, widths: tuple[int, ...], asked: list[int], chosen: int | None
) -> None:
    room = Room(*widths)
    assert choose(JournalWidth(), room, step) == chosen
    assert room.asked == asked


@pytest.mark.parametrize(
    "step,narrow,wide,width",
    [(5, 166, 0, 1), (5, 167, 0, 2), (5, 0, 0, 1), (2, 166, 0, 1), (2, 200, 0, 2), (2, 200, 34, 1), (2, 0, 0, 1)],
)
def test_codes_are_of_the_width_that_takes_fewer_bytes(step: int, narrow: int, wide: int, width: int) -> None:
    """An escape takes 6 bytes: 167 of 1,000 parameters take more than a second byte of all."""
    chooser = JournalWidth()
    assert choose(chooser, Room(1, 2), step) == (2 if step == 2 else 1)
    use: Any = SimpleNamespace(narrow_escapes=narrow, escapes=(wide if step == 2 else narrow, 0, 0))
    chooser.learn_from_use(use, 1000)
    assert choose(chooser, Room(1, 2), 5) == width


def test_an_overflow_widens_the_codes_and_the_next_leaves_the_bucket_out_ever_longer() -> None:
    chooser, room = JournalWidth(), Room(1, 2)
    assert choose(chooser, room, 5) == 1
    chooser.learn_from_overflow(5)
    for held in (2, 4, 8, 16, 16):
        assert choose(chooser, room, 6) == 2
        chooser.learn_from_overflow(6)
        asked = len(room.asked)
        assert [choose(chooser, room, 7) for _ in range(held)] == [None] * held
        assert len(room.asked) == asked, "no room is taken for a bucket that is left out"


def test_an_overflow_in_the_second_step_says_nothing_of_the_third() -> None:
    chooser, room = JournalWidth(), Room(1, 2)
    assert choose(chooser, room, 2) == 2
    chooser.learn_from_overflow(2)
    assert choose(chooser, room, 3) == 1
