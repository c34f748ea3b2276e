"""``"ratio"`` below 1: state that stays on the accelerator. Here the accelerator is this processor, and its kernels are
emulated; which sub-groups stay, DeepSpeed tells only where there is another one, so the tests tell."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from superoffload.errors import ArgumentError
from superoffload.integrations.deepspeed import driver
from superoffload.integrations.deepspeed.stage3 import optimizer as stage3
from tests.support import emulated_kernels
from tests.support.deepspeed.ranks import Ranks
from tests.support.deepspeed.scenarios import FORMS, SCENARIOS, WAYS, Scenario
from tests.support.deepspeed.training import OURS, end
from tests.support.resident_link import ResidentHostLink

pytestmark = pytest.mark.in_turn("ratio")

SOME, ALL = frozenset({0, 2}), frozenset(range(100))
NONE: frozenset[int] = frozenset()


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    emulated_kernels.library_path()  # built once, before ranks need it


def small_groups(name: str) -> Scenario:
    """Several sub-groups, so that some can stay and some not."""
    scenario = SCENARIOS[name]
    zero = {**scenario.config.get("zero", {}), "sub_group_size": 1000}
    return replace(scenario, config={**scenario.config, "zero": zero})


@contextmanager
def staying(sub_groups: frozenset[int]) -> Iterator[list[ResidentHostLink]]:
    made: list[ResidentHostLink] = []

    def link(device: torch.device) -> ResidentHostLink:
        made.append(ResidentHostLink())
        return made[-1]

    def chosen(devices: dict[int, str]) -> frozenset[int]:
        return sub_groups & frozenset(devices)

    with mock.patch.multiple(stage3, resident_sub_groups=chosen, accelerator_link=link):
        yield made


def trained(name: str, way: str, sub_groups: frozenset[int], form: str = "fp32", steps: int = 6) -> dict[str, Any]:
    scenario = small_groups(name)
    offload, options = WAYS[way]
    with staying(sub_groups) as links:
        engine = scenario.engine(offload, {**(options or {}), **FORMS[form]})
    record = scenario.train(engine, range(steps))
    result = {
        "record": record,
        "digests": engine.optimizer.state_digests(),
        "stepped": {shard for link in links for shard in link.residency.stepped},
        "resident": {
            shard.name for shard in engine.optimizer.parts.driver.engine.shards if shard.resident and shard.numel
        },
        "stats": engine.optimizer.stats(),
        "parts": len(engine.optimizer.fp16_groups),
    }
    end(engine)
    return result


@pytest.mark.parametrize(
    ("name", "way", "sub_groups", "form"),
    [
        ("clip sometimes", "ours, later", SOME, "fp32"),
        ("fp16, dynamic scale", "ours", SOME, "fp32"),
        ("accumulation in fp32", "ours", SOME, "8bit"),
        ("two backwards", "ours", SOME, "split"),
        ("persistent parameters", "ours, later", SOME, "bf16"),
        ("bf16, not finite", "match", ALL, "8bit+split"),
    ],
)
def test_state_on_the_accelerator_has_the_same_bits(
    name: str, way: str, sub_groups: frozenset[int], form: str, two_ranks: Ranks
) -> None:
    expected = two_ranks.run(trained, name, way, NONE, form)
    found = two_ranks.run(trained, name, way, sub_groups, form)
    for on_host, mixed in zip(expected, found, strict=True):
        assert mixed["parts"] > 3
        assert mixed["resident"], "nothing stayed, so nothing was tested"
        assert mixed["stepped"] == mixed["resident"]
        assert mixed["digests"] == on_host["digests"]
        assert repr(mixed["record"]) == repr(on_host["record"])  # with NaN, which equals nothing
        assert mixed["stats"]["params_on_device"] > on_host["stats"]["params_on_device"] == 0


def saved_and_resumed(folder: str, first: frozenset[int], then: frozenset[int], form: str) -> None:
    """A run that was saved on its way, and another one that continued from there."""
    scenario = small_groups("clip sometimes")
    found: list[Any] = []
    for sub_groups in (first, then):
        with staying(sub_groups):
            engine = scenario.engine(OURS, {"speculation": "always", **FORMS[form]})
        if not found:
            scenario.train(engine, range(3))
            engine.save_checkpoint(folder, tag="saved")
        else:
            scenario.train(engine, range(50, 52))
            engine.load_checkpoint(folder, tag="saved")
        scenario.train(engine, range(3, 6))
        found.append(engine.optimizer.state_digests())
        end(engine)
    assert found[0] == found[1]


@pytest.mark.parametrize(("first", "then", "form"), [(SOME, NONE, "8bit+split"), (NONE, SOME, "fp32")])
def test_checkpoints_fit_any_ratio(
    first: frozenset[int], then: frozenset[int], form: str, two_ranks: Ranks, tmp_path: Path
) -> None:
    two_ranks.run(saved_and_resumed, str(tmp_path), first, then, form)


def test_which_sub_groups_stay_and_what_is_refused() -> None:
    assert driver.resident_sub_groups({0: "cuda", 1: "cuda", 2: "cpu"}) == {0, 1}
    places: list[Any] = [SimpleNamespace(device=torch.device(where)) for where in ("cuda:0", "cpu")]
    master, published = places
    with pytest.raises(ArgumentError, match=r"offload_param.*sub-group 1.*set ratio to 1\.0"):
        driver.check_resident({1: master}, {1: published})
