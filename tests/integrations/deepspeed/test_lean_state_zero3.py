"""Leaner state on ZeRO-3's partitions, and ``"ratio"`` below 1, which leaves state on the accelerator: any schedule,
readers, writers, what is refused.

Here the accelerator is this processor, and its kernels are emulated; which sub-groups stay, DeepSpeed tells only where
there is another one, so the tests tell.
"""

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
from torch import Tensor

from superoffload.errors import ArgumentError
from superoffload.integrations.deepspeed import driver
from superoffload.integrations.deepspeed.zero import parts, stage3
from tests.support import emulated_kernels
from tests.support.deepspeed.ranks import Ranks
from tests.support.deepspeed.scenarios import FORMS, SCENARIOS, WAYS, Scenario
from tests.support.deepspeed.training import OURS, end, masters
from tests.support.resident_link import ResidentHostLink

pytestmark = pytest.mark.in_turn("lean state zero3")

NONE: frozenset[int] = frozenset()
SOME, ALL = frozenset({0, 2}), frozenset(range(100))


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

    with mock.patch.object(stage3, "resident_sub_groups", chosen), mock.patch.object(parts, "accelerator_link", link):
        yield made


def trained(name: str, way: str, form: str, sub_groups: frozenset[int] = NONE) -> dict[str, Any]:
    scenario = small_groups(name)
    offload, options = WAYS[way]
    with staying(sub_groups) as links:
        engine = scenario.engine(offload, {**(options or {}), **FORMS[form], "rank_check": "full"})
    for partition in engine.optimizer.parts.driver.partitions.values():  # the noise counts elements of the whole
        assert partition.shard.offset == torch.distributed.get_rank() * partition.padded.numel()
    record = scenario.train(engine, range(6))
    shards = engine.optimizer.parts.driver.engine.shards
    found = {
        "record": repr({**record, "losses": []}),  # with NaN, which equals nothing
        "masters": masters(engine),
        "digests": engine.optimizer.state_digests(),
        "stats": engine.optimizer.stats(),
        "numel": sum(shard.numel for shard in shards),
        "flat": [flat.numel() for flat in engine.optimizer.fp32_partitioned_groups_flat],
        "stepped": {shard for link in links for shard in link.residency.stepped},
        "resident": {shard.name for shard in shards if shard.resident and shard.numel},
    }
    end(engine)
    return found


@pytest.mark.parametrize(
    ("name", "form", "sub_groups", "way"),
    [
        ("clip sometimes", "fp32", SOME, "ours, later"),
        ("fp16, dynamic scale", "fp32", SOME, "ours"),
        ("accumulation in fp32", "8bit", SOME, "ours"),
        ("accumulation", "bf16+split", SOME, "ours, later"),
        ("two backwards", "split", SOME, "ours"),
        ("persistent parameters", "bf16", SOME, "ours, later"),
        ("bf16, not finite", "8bit+split", ALL, "ours"),
    ],
)
def test_any_schedule_and_any_place_have_the_same_bits(
    name: str, form: str, sub_groups: frozenset[int], way: str, two_ranks: Ranks
) -> None:
    """And the full check of ranks finds nothing."""
    waiting = two_ranks.run(trained, name, "ours, waiting", form)
    on_host = two_ranks.run(trained, name, "ours, later" if way == "ours" else "ours", form)
    mixed = two_ranks.run(trained, name, way, form, sub_groups)
    for expected, other, found in zip(waiting, on_host, mixed, strict=True):
        assert found["resident"], "nothing stayed, so nothing was tested"
        assert found["stepped"] == found["resident"]
        assert found["digests"] == other["digests"] == expected["digests"]
        assert found["record"] == other["record"] == expected["record"]
        assert found["stats"]["params_on_device"] > other["stats"]["params_on_device"] == 0
        assert max(one["stats"]["buckets_speculated"] for one in (other, found)) > 0


def test_split_masters_are_those_of_whole_ones_and_take_no_flat_buffer(two_ranks: Ranks) -> None:
    whole = two_ranks.run(trained, "clip sometimes", "ours", "fp32")
    split = two_ranks.run(trained, "clip sometimes", "ours", "split")
    for one, other in zip(whole, split, strict=True):
        assert all(torch.equal(value, other["masters"][name]) for name, value in one["masters"].items())
        assert min(one["flat"]) > 0 == max(other["flat"])
        saved = one["stats"]["host_bytes"] - other["stats"]["host_bytes"]
        assert 2 * one["numel"] <= saved + 4096 <= 2 * one["numel"] + 8192  # the journals round up


def read_and_written(form: str) -> dict[str, Tensor]:
    """What DeepSpeed's helpers read, and what they read of what they wrote; then trains on."""
    from deepspeed import utils

    scenario = SCENARIOS["clip sometimes"]
    engine = scenario.engine(OURS, {**FORMS[form], "speculation": "always"})
    scenario.train(engine, range(3))
    params = list(engine.module.parameters())
    for param in params:
        assert utils.safe_get_full_optimizer_state(param, "exp_avg").dtype is torch.float32
        assert utils.safe_get_local_optimizer_state(param, "exp_avg_sq").dtype is torch.float32
    entry = engine.optimizer.state_dict()["optimizer_state_dict"]["state"][0]
    saved = torch.bfloat16 if "b" in form else torch.float32
    assert entry["exp_avg"].dtype == entry["exp_avg_sq"].dtype == saved
    for number, param in enumerate(params):  # also those that ranks do not share evenly, and empty partitions
        value = torch.arange(param.ds_numel, dtype=torch.float32).view(param.ds_shape) / 64 + number + 1
        utils.safe_set_full_fp32_param(param, value)
        utils.safe_set_full_optimizer_state(param, torch.full_like(value, 0.5), "exp_avg")
        part = torch.full((param.ds_tensor.numel(),), 0.25)
        utils.safe_set_local_optimizer_state(param, part, "exp_avg_sq")
        assert torch.equal(utils.safe_get_full_fp32_param(param), value)
        for name, expected in (("exp_avg", 0.5), ("exp_avg_sq", 0.25)):
            found = utils.safe_get_full_optimizer_state(param, name)
            assert torch.equal(found, torch.full_like(value, expected))
    if form == "8bit+split":
        refused(engine, params[0])
    scenario.train(engine, range(3, 6))
    trained = masters(engine)
    end(engine)
    return trained


def refused(engine: Any, param: Any) -> None:
    """Bad values change nothing."""
    from deepspeed import utils

    before = engine.optimizer.state_digests()
    good = torch.ones(param.ds_shape)
    for write, value, name, words in (
        (utils.safe_set_full_optimizer_state, good * float("nan"), "exp_avg", "finite"),
        (utils.safe_set_full_optimizer_state, -good, "exp_avg_sq", "below 0"),
        (utils.safe_set_full_optimizer_state, good[1:], "exp_avg", "expected the"),
        (utils.safe_set_local_optimizer_state, good[1:], "exp_avg", "with padding"),
        (utils.safe_set_full_optimizer_state, good, "momentum_buffer", "'exp_avg', 'exp_avg_sq'"),
    ):
        with pytest.raises(ArgumentError, match=words):
            write(param, value, name)
    assert engine.optimizer.state_digests() == before


def test_helpers_read_and_write_every_form(two_ranks: Ranks) -> None:
    whole, split, _ = (two_ranks.run(read_and_written, form)[0] for form in ("fp32", "split", "8bit+split"))
    assert all(torch.equal(value, split[name]) for name, value in whole.items())


# ---- "ratio" -------------------------------------------------------------------------------------------------------


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
