"""Errors that a test expects by its marks ``refused("text")``; the fixture ``refusal`` has them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


class Refusal:
    """Checks that an error contains each of the texts."""

    def __init__(self, expected: list[str]) -> None:
        assert expected, "a test that uses `refusal` needs a mark refused(...)"
        self._expected = expected

    def check(self, text: str) -> None:
        for expected in self._expected:
            assert expected in text

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with pytest.raises(Exception) as caught:
            yield
        self.check(str(caught.value))
