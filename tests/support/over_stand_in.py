"""Tests that run once more with their optimizers over the CUDA link and the fake driver (tests/support/fake_cuda.py).

The hooks in tests/conftest.py run them. A run counts only if a link was made and gradients went over it. Where a test's
mark says that gradients are brought back, some are, and else none. (Tests of checkpoints accumulate without
accumulate(), on purpose: they are about other things.)

A step() over the link takes back what waits for a worker. Here it waits for that instead, so that what tests say of
counters holds at any speed of the workers.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

if TYPE_CHECKING:  # the kernel tests also run where only NumPy is installed
    from tests.support.fake_cuda import Fake, LateLink

LINKS = [
    pytest.param("host", id=getattr(pytest, "HIDDEN_PARAM", "host")),  # no name from pytest 8.4 on
    pytest.param("stand-in", id="stand-in", marks=pytest.mark.filterwarnings("ignore:superoffload. .* needed again")),
]


@dataclass
class Used:
    """What a run over the stand-in came to."""

    links: list[LateLink]
    brought_back: list[str] = field(default_factory=list)  # where from, each time


USED = pytest.StashKey[Used]()


def is_over_stand_in(item: Any) -> bool:
    callspec = getattr(item, "callspec", None)
    return callspec is not None and callspec.params.get("link_below") == "stand-in"


def only_over_stand_in(**parameters: Any) -> pytest.MarkDecorator:
    """Over the stand-in a test runs with these of its parameters only: one value of each, or a tuple of values."""
    return pytest.mark.only_over_stand_in(
        **{name: value if isinstance(value, tuple) else (value,) for name, value in parameters.items()}
    )


def is_wanted(item: Any) -> bool:
    mark = item.get_closest_marker("only_over_stand_in")
    if mark is None or not is_over_stand_in(item):
        return True
    return all(item.callspec.params[name] in wanted for name, wanted in mark.kwargs.items())


@contextmanager
def over_stand_in(fake: Fake) -> Iterator[list[LateLink]]:
    """Optimizers made inside are over the link; yields their links."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from tests.support.fake_cuda import InOrderLink, on_fake_device

    hook = register_optimizer_step_pre_hook(_await_workers)
    try:
        with on_fake_device(fake, InOrderLink) as links:
            yield links
    finally:
        hook.remove()


def _await_workers(optimizer: Any, *_: Any) -> None:
    from superoffload import AdamW

    if isinstance(optimizer, AdamW):
        for bucket in optimizer._engine.buckets:
            if bucket.running is not None:
                bucket.running.wait()


@contextmanager
def below(item: pytest.Item, fake: Fake) -> Iterator[None]:
    from superoffload.optimizer.freed_gradients import FreedGradients

    real = FreedGradients.bring_back
    with over_stand_in(fake) as links:
        used = item.stash[USED] = Used(links)

        def counted(*args: Any) -> None:
            used.brought_back.append("".join(traceback.format_stack(limit=12)))
            real(*args)

        with mock.patch.object(FreedGradients, "bring_back", counted):
            yield


def check_used(item: pytest.Item) -> None:
    """A test that has passed over the stand-in really was over it, and its cells say what it cost."""
    if not is_over_stand_in(item):
        return
    used = item.stash[USED]
    check_links(used.links)
    mark = item.get_closest_marker("over_stand_in")
    brings_back = "" if mark is None else mark.kwargs.get("brings_back", "")
    if brings_back == "always":
        assert used.brought_back, "no gradient was brought back, so the mark must not say it"
    elif not brings_back and not item.path.name.startswith("test_saving"):
        from_where = "".join(used.brought_back[:1])
        assert not used.brought_back, f"gradients were brought back, and the mark does not say so:\n{from_where}"


def check_links(links: list[LateLink]) -> None:
    assert links, "no optimizer of this test was made over the stand-in"
    assert all(link.frees_gradients for link in links), "gradients were kept"
    assert any(link.bytes_down > 0 for link in links), "no gradient went over the stand-in"
    assert links[0].fake_device.fake.mismatches == 0, "a parameter was written before its readers had read it"
