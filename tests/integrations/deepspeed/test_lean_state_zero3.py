"""bf16 and 8-bit moments and split masters on ZeRO-3's partitions: any schedule, readers, writers, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from superoffload.errors import ArgumentError
from tests.support.deepspeed.ranks import Ranks
from tests.support.deepspeed.scenarios import FORMS, SCENARIOS
from tests.support.deepspeed.training import OURS, end, masters

pytestmark = pytest.mark.in_turn("lean state zero3")

WAYS: dict[str, dict[str, Any]] = {
    "speculating": {"speculation": "always"},
    "waiting": {"speculation": "never"},
    "later": {"speculation": "adaptive", "delivery": "on_demand"},
}


def trained(name: str, form: str, way: str, **options: Any) -> dict[str, Any]:
    scenario = SCENARIOS[name]
    engine = scenario.engine(OURS, {**FORMS[form], **WAYS[way], **options})
    for partition in engine.optimizer.parts.driver.partitions.values():  # the noise counts elements of the whole
        assert partition.shard.offset == torch.distributed.get_rank() * partition.padded.numel()
    record = scenario.train(engine, range(6))
    found = {
        "record": repr(record),  # with NaN, which equals nothing
        "masters": masters(engine),
        "digests": engine.optimizer.state_digests(),
        "stats": engine.optimizer.stats(),
        "numel": sum(shard.numel for shard in engine.optimizer.parts.driver.engine.shards),
        "flat": [flat.numel() for flat in engine.optimizer.fp32_partitioned_groups_flat],
    }
    end(engine)
    return found


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("bf16, not finite", "8bit+split"),
        ("accumulation", "bf16+split"),
        ("two backwards", "split"),
    ],
)
def test_schedules_agree_and_the_full_check_finds_nothing(name: str, form: str, two_ranks: Ranks) -> None:
    runs = {way: two_ranks.run(trained, name, form, way, rank_check="full") for way in WAYS}
    for waiting, *others in zip(runs["waiting"], runs["speculating"], runs["later"], strict=True):
        for other in others:
            assert other["digests"] == waiting["digests"]
            assert other["record"] == waiting["record"]
    assert all(found["stats"]["buckets_speculated"] > 0 for found in runs["speculating"])


def test_split_masters_are_those_of_whole_ones_and_take_no_flat_buffer(two_ranks: Ranks) -> None:
    whole = two_ranks.run(trained, "clip sometimes", "fp32", "speculating")
    split = two_ranks.run(trained, "clip sometimes", "split", "speculating")
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
        (utils.safe_set_local_optimizer_state, good[1:], "exp_avg", "with its padding"),
        (utils.safe_set_full_optimizer_state, good, "momentum_buffer", "'exp_avg', 'exp_avg_sq'"),
    ):
        with pytest.raises(ArgumentError, match=words):
            write(param, value, name)
    assert engine.optimizer.state_digests() == before


def test_helpers_read_and_write_every_form(two_ranks: Ranks) -> None:
    whole, split, _ = (two_ranks.run(read_and_written, form)[0] for form in ("fp32", "split", "8bit+split"))
    assert all(torch.equal(value, split[name]) for name, value in whole.items())
