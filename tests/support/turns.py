"""Cases of a test that take turns from commit to commit, beside those that run every time (``in_turn`` in
tests/conftest.py)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def in_turn(cases: Iterable[Any], every_time: Collection[Any]) -> list[Any]:
    return [pytest.param(case, marks=() if case in every_time else pytest.mark.in_turn) for case in cases]
