"""Tests that run once more with their optimizers over the CUDA link and the fake driver (tests/fake_cuda.py).

Those are the tests that fill the column "stand_in" of docs/compatibility.md. Gradients are freed as they are packed,
as on a GPU, and a program reads parameters once its stream has come so far. A run counts only if a link was made and
gradients went over it. The hooks that call this are in tests/conftest.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # the kernel tests also run where only NumPy is installed
    from tests.fake_cuda import Fake, LateLink

COLUMN = "stand_in"
LINKS = [pytest.param("host", id=pytest.HIDDEN_PARAM), pytest.param("stand-in", id="stand-in")]
_MADE = pytest.StashKey["list[LateLink]"]()


def shows_stand_in(item: Any) -> bool:
    return any(COLUMN in mark.args[1:] for mark in item.iter_markers("compat"))


def is_over_stand_in(item: Any) -> bool:
    callspec = getattr(item, "callspec", None)
    return callspec is not None and callspec.params.get("link_below") == "stand-in"


def only_over_stand_in(**parameters: Any) -> pytest.MarkDecorator:
    """Over the stand-in a test runs with these of its parameters only: one value of each, or a tuple of values."""
    return pytest.mark.only_over_stand_in(**parameters)


def is_wanted(item: Any) -> bool:
    mark = item.get_closest_marker("only_over_stand_in")
    if mark is None or not is_over_stand_in(item):
        return True
    given = item.callspec.params
    return all(given[name] in (wanted if isinstance(wanted, tuple) else (wanted,)) for name, wanted in mark.kwargs.items())


@contextmanager
def below(item: pytest.Item, fake: Fake) -> Iterator[None]:
    from tests.fake_cuda import InOrderLink, on_fake_device

    with on_fake_device(fake, InOrderLink) as links:
        item.stash[_MADE] = links
        yield


def check_used(item: pytest.Item) -> None:
    """A test that has passed over the stand-in really was over it."""
    if not is_over_stand_in(item):
        return
    links = item.stash[_MADE]
    assert links, "no optimizer of this test was made over the stand-in"
    assert all(link.frees_gradients for link in links)
    assert any(link.bytes_down > 0 for link in links), "no gradient went over the stand-in"
