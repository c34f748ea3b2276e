"""Two ranks for all tests of this folder, and the reason why they are skipped where DeepSpeed is not installed."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest

from tests.deepspeed.ranks import Ranks

os.environ.setdefault("DS_ACCELERATOR", "cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("deepspeed") is None:
        here = os.path.dirname(__file__)
        for item in items:
            if str(item.path).startswith(here):
                item.add_marker(pytest.mark.skip(reason="needs deepspeed, which is not installed"))


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    group = Ranks(2)
    yield group
    group.close()
