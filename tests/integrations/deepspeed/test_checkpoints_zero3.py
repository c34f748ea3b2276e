"""Checkpoints: resumed to the bit, exchanged with stock ZeRO-Offload, and understood by DeepSpeed's own tools."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.compatibility import compat
from tests.support.deepspeed.checkpoint_runs import SCENARIOS, load_and_train, make_universal, train_and_save
from tests.support.deepspeed.ranks import Ranks
from tests.support.deepspeed.scenarios import WAYS, Scenario, distance
from tests.support.deepspeed.training import end, masters


@compat("save, kill, resume: the same losses and bits as a run never stopped", "deepspeed")
@compat("a checkpoint in the middle of an accumulation window: that of the last finished step", "deepspeed")
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("way", ["ours", "ours, later"])
def test_resume_is_bit_exact(scenario: str, way: str, two_ranks: Ranks, tmp_path: Path) -> None:
    straight = two_ranks.run(train_and_save, scenario, way, str(tmp_path), 4, 8)
    resumed = two_ranks.run(load_and_train, scenario, way, str(tmp_path), 4, 8)
    for (_, expected, record), (_, found, again) in zip(straight, resumed, strict=True):
        assert found == expected
        assert again == record


@compat("state of torch.optim.AdamW taken over, and given back", "deepspeed", note="as stock ZeRO's checkpoints")
@pytest.mark.parametrize(("first", "then"), [("stock", "match"), ("match", "stock")])
def test_stock_and_ours_read_each_others(first: str, then: str, two_ranks: Ranks, tmp_path: Path) -> None:
    straight = two_ranks.run(train_and_save, "bf16", first, str(tmp_path), 4, 8)
    resumed = two_ranks.run(load_and_train, "bf16", then, str(tmp_path), 4, 8)
    for (expected, _, record), (found, _, again) in zip(straight, resumed, strict=True):
        assert distance(expected, found) < 8 * 10 * 2.0**-24
        assert again["norms"] == record["norms"]


def padding() -> float:
    """What is stored behind the parameters, where memory that is not written yet holds NaN."""
    from superoffload.integrations.deepspeed.stage3.shards import numel_here

    torch.use_deterministic_algorithms(True, warn_only=True)  # which fills it
    try:
        engine = SCENARIOS["bf16"].engine(*WAYS["ours"])
    finally:
        torch.use_deterministic_algorithms(False)
    found = 0.0
    for flat, params in zip(engine.optimizer.fp32_partitioned_groups_flat, engine.optimizer.fp16_groups, strict=True):
        start = 0
        for param in params:
            size, numel = param.partition_numel(), numel_here(param, engine.optimizer.dp_process_group)
            found += float(flat[start + numel : start + size].detach().abs().sum())
            start += size
    end(engine)
    return found


def test_padding_is_zero(two_ranks: Ranks) -> None:
    """Two checkpoints of one state are the same, to the bit."""
    assert two_ranks.run(padding) == [0.0, 0.0]


def test_a_checkpoint_of_before_the_first_step(two_ranks: Ranks, tmp_path: Path) -> None:
    for way in ("stock", "ours"):
        folder = str(tmp_path / way)
        straight = two_ranks.run(train_and_save, "bf16", way, folder, 0, 3)
        resumed = two_ranks.run(load_and_train, "bf16", "ours", folder, 0, 3)
        for (expected, _, _), (found, _, _) in zip(straight, resumed, strict=True):
            assert distance(expected, found) < 1e-5


def test_loading_weights_only(two_ranks: Ranks, tmp_path: Path) -> None:
    """Masters follow the loaded weights; stock and ours go on alike."""
    two_ranks.run(train_and_save, "bf16", "ours", str(tmp_path), 4, 4)
    found = [
        two_ranks.run(load_and_train, "bf16", way, str(tmp_path), 4, 4, load_module_only=True)
        for way in ("stock", "ours")
    ]
    for (stock, _, _), (ours, _, _) in zip(*found, strict=True):
        assert distance(stock, ours) == 0.0


def test_zero_to_fp32(two_ranks: Ranks, tmp_path: Path) -> None:
    expected, _, _ = two_ranks.run(train_and_save, "bf16", "ours", str(tmp_path), 4, 4)[0]
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    found = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), tag="saved")
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert torch.equal(found[name].float(), value)


def save_16_bit(folder: str, way: str) -> dict[str, Tensor]:
    scenario = SCENARIOS["bf16"]
    configured = Scenario({**scenario.config, "zero": {"stage3_gather_16bit_weights_on_model_save": True}})
    engine = configured.engine(*WAYS[way])
    configured.train(engine, range(3))
    assert engine.save_16bit_model(folder, "weights.bin")
    found = masters(engine)
    end(engine)
    return found


@compat(
    "the model exported as safetensors for from_pretrained",
    "deepspeed",
    note="as `save_16bit_model` and `zero_to_fp32`",
)
@pytest.mark.parametrize("way", ["ours", "ours, later"])
def test_save_16bit_model(way: str, two_ranks: Ranks, tmp_path: Path) -> None:
    expected = two_ranks.run(save_16_bit, str(tmp_path), way)[0]
    found = torch.load(tmp_path / "weights.bin")
    for name, value in expected.items():
        assert torch.equal(found[name], value.bfloat16())


def load_universal(folder: str, way: str) -> tuple[dict[str, Tensor], dict[str, list[Tensor]], list[int]]:
    from deepspeed.utils import safe_get_full_optimizer_state

    scenario = SCENARIOS["bf16"]
    configured = Scenario({**scenario.config, "checkpoint": {"load_universal": True}})
    engine = configured.engine(*WAYS[way])
    configured.train(engine, range(50, 52))
    engine.load_checkpoint(folder, tag="universal")
    moments = {
        name: [safe_get_full_optimizer_state(param, key).clone() for key in ("exp_avg", "exp_avg_sq")]
        for name, param in engine.module.named_parameters()
    }
    found = masters(engine)
    steps = list(engine.optimizer.parts.driver.steps)
    configured.train(engine, range(4, 6))  # trains on
    end(engine)
    return found, moments, steps


def moments_of(folder: str) -> dict[str, list[Tensor]]:
    from deepspeed.utils import safe_get_full_optimizer_state

    engine = SCENARIOS["bf16"].engine(*WAYS["ours"])
    engine.load_checkpoint(folder, tag="saved")
    found = {
        name: [safe_get_full_optimizer_state(param, key).clone() for key in ("exp_avg", "exp_avg_sq")]
        for name, param in engine.module.named_parameters()
    }
    end(engine)
    return found


@compat("saved by some ranks, loaded by another number of them", "deepspeed")
def test_universal_checkpoint_on_another_number_of_ranks(two_ranks: Ranks, tmp_path: Path) -> None:
    expected, _, _ = two_ranks.run(train_and_save, "bf16", "ours", str(tmp_path), 4, 4)[0]
    moments = two_ranks.run(moments_of, str(tmp_path))[0]
    make_universal(tmp_path)
    one_rank = Ranks(1)
    try:
        found, found_moments, steps = one_rank.run(load_universal, str(tmp_path), "ours")[0]
    finally:
        one_rank.close()
    assert all(step == 4 for step in steps)
    for name, value in expected.items():
        assert torch.equal(found[name], value)
        assert all(torch.equal(a, b) for a, b in zip(found_moments[name], moments[name], strict=True))
