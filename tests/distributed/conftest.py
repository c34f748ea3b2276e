"""Ranks that tests share end with the file that started them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.rank_processes import close_pools


@pytest.fixture(scope="module", autouse=True)
def _ranks_end_with_their_file() -> Iterator[None]:
    yield
    close_pools()
