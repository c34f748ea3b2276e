"""A run over the stand-in is one: it has the link, waits as a GPU's stream does, and counts only if it was used."""

from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from superoffload import AdamW
from tests import conftest
from tests.support.adamw_training import batch, model_of, train, weights
from tests.support.compatibility import Collector, compat
from tests.support.fake_cuda import Fake, FakeDevice
from tests.support.over_stand_in import (
    SLOWER,
    SOMETIMES_SLOWER,
    USED,
    Used,
    below,
    check_links,
    check_used,
    is_wanted,
    only_over_stand_in,
    over_stand_in,
)


def item(link: str, *marks: pytest.MarkDecorator, **params: Any) -> Any:
    """What the hooks read of a test."""

    def of_name(name: str) -> list[pytest.Mark]:
        return [mark.mark for mark in marks if mark.mark.name == name]

    return SimpleNamespace(
        nodeid=f"tests/test_x.py::test_y[{link}]",
        callspec=SimpleNamespace(params={"link_below": link, **params}, marks=()),
        iter_markers=of_name,
        get_closest_marker=lambda name: next(iter(of_name(name)), None),
        stash={},
        path=Path("tests/test_x.py"),
    )


def test_parameters_are_read_behind_the_stream(fake: Fake) -> None:
    """However late the device is, and a step waits for what was speculated."""
    fake.delays(7, 3000.0)
    model, twin = model_of(), model_of()
    options: dict[str, Any] = {"speculation": "always", "threads": 1, "bucket_numel": 1024}
    with over_stand_in(fake) as links, AdamW(model.parameters(), **options) as optimizer:
        train(model, optimizer, range(3))
        found, stats = weights(model), optimizer.stats()
        check_links(links)
    with AdamW(twin.parameters(), threads=1) as host:
        train(twin, host, range(3))
    assert torch.equal(found, weights(twin))
    assert stats["buckets_committed"] == stats["buckets_speculated"] > 0


def test_a_run_without_the_link_does_not_count(fake: Fake) -> None:
    with pytest.raises(AssertionError, match="no optimizer of this test"):
        check_links([])
    model = model_of()
    with over_stand_in(fake) as links:
        with AdamW(model.parameters(), threads=1), pytest.raises(AssertionError, match="no gradient went over"):
            check_links(links)
        with AdamW(model.parameters(), threads=1, keep_grads=True) as keeping:
            train(model, keeping, range(1))
            with pytest.raises(AssertionError, match="gradients were kept"):
                check_links(links)


def test_a_marked_test_is_checked_once_it_has_passed() -> None:
    for link in ("host", "stand-in"):
        test = item(link)
        test.stash[USED] = Used([])
        call: Any = conftest.pytest_pyfunc_call(test)
        next(call)
        with pytest.raises(StopIteration if link == "host" else AssertionError):
            call.send(True)


@pytest.mark.filterwarnings("ignore:superoffload. .* needed again")
def test_cells_say_where_gradients_are_brought_back(fake: Fake) -> None:
    notes = ("", SLOWER, SOMETIMES_SLOWER)
    for passes, right in ((1, ("", SOMETIMES_SLOWER)), (2, (SLOWER, SOMETIMES_SLOWER))):
        test, model = item("stand-in"), model_of()
        with below(test, fake), AdamW(model.parameters(), threads=1) as optimizer:
            for seed in range(passes):
                batch(model, seed).backward()
            optimizer.step()
        for note in notes:
            noted = item("stand-in", compat("closure", "stand_in", note=note))
            noted.stash = test.stash
            if note in right:
                check_used(noted)
            else:
                with pytest.raises(AssertionError, match="brought back"):
                    check_used(noted)


def test_parameters_that_a_run_has() -> None:
    only = only_over_stand_in(family="llama", size=(1, 2))
    for family, size, wanted in (("llama", 2, True), ("llama", 3, False), ("qwen", 1, False)):
        assert is_wanted(item("stand-in", only, family=family, size=size)) == wanted
        assert is_wanted(item("host", only, family=family, size=size))


def test_each_run_fills_its_own_column() -> None:
    mark = compat("closure", "single", "stand_in")
    collector = Collector()
    for link, columns in (("host", {"single"}), ("stand-in", {"single", "stand_in"})):
        collector.pytest_collection_modifyitems([item(link, mark)])
        assert set(collector.table["closure"]) == columns


@pytest.mark.parametrize("over", [False, True])
def test_memory_is_overwritten_during_its_test_and_not_by_a_later_garbage_collection(fake: Fake, over: bool) -> None:
    device = FakeDevice(fake)
    memory = torch.zeros(48)
    gradient = memory.detach()
    weakref.finalize(gradient, device.gradient_freed, memory.data_ptr(), memory, fake.current)
    if over:
        fake.finish()  # as at the end of a test; the gradient is in a cycle, say
    with mock.patch.object(fake, "write") as write:
        del gradient
    assert write.called is not over
