"""Checkpoints: resumed to the bit, exchanged with stock ZeRO-Offload, and understood by DeepSpeed's own tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.deepspeed.checkpoint_runs import (
    SCENARIOS,
    load_and_train,
    make_universal,
    train_and_save,
)
from tests.support.deepspeed.ranks import Ranks
from tests.support.deepspeed.scenarios import FORMS, WAYS, Scenario, distance
from tests.support.deepspeed.training import end, masters


@pytest.mark.parametrize(
    ("scenario", "way", "form", "saved"),
    [
        ("fp16", "ours", "fp32", 4),
        ("bf16", "ours, later", "split", 4),
        ("groups", "ours", "bf16", 4),
        ("groups", "ours, later", "8bit", 4),
        ("bf16", "ours", "8bit+split", 0),
    ],
)
def test_resume_is_bit_exact(scenario: str, way: str, form: str, saved: int, two_ranks: Ranks, tmp_path: Path) -> None:
    straight = two_ranks.run(train_and_save, scenario, way, str(tmp_path), saved, saved + 3, FORMS[form])
    resumed = two_ranks.run(load_and_train, scenario, way, str(tmp_path), saved, saved + 3, FORMS[form])
    for (_, expected, record), (_, found, again) in zip(straight, resumed, strict=True):
        assert found == expected
        assert again == record


@pytest.mark.parametrize(
    ("first", "then", "saved"), [("stock", "match", 4), ("match", "stock", 4), ("stock", "match", 0)]
)
def test_stock_and_ours_read_each_others(first: str, then: str, saved: int, two_ranks: Ranks, tmp_path: Path) -> None:
    straight = two_ranks.run(train_and_save, "bf16", first, str(tmp_path), saved, saved + 4)
    resumed = two_ranks.run(load_and_train, "bf16", then, str(tmp_path), saved, saved + 4)
    for (expected, _, record), (found, _, again) in zip(straight, resumed, strict=True):
        assert distance(expected, found) < 8 * 10 * 2.0**-24
        assert again["norms"] == record["norms"]


def padding() -> None:
    """What is stored behind the parameters, where memory that is not written yet holds NaN, is zero: two checkpoints of
    one state are the same, to the bit."""
    from superoffload.integrations.deepspeed.stage3.shards import numel_here

    torch.use_deterministic_algorithms(True, warn_only=True)  # which fills it
    try:
        engine = SCENARIOS["bf16"].engine(*WAYS["ours"])
    finally:
        torch.use_deterministic_algorithms(False)
    for flat, params in zip(engine.optimizer.fp32_partitioned_groups_flat, engine.optimizer.fp16_groups, strict=True):
        start = 0
        for param in params:
            size, numel = param.partition_numel(), numel_here(param, engine.optimizer.dp_process_group)
            assert not flat[start + numel : start + size].any()
            start += size
    end(engine)


def test_padding_is_zero(two_ranks: Ranks) -> None:
    two_ranks.run(padding)


def test_loading_weights_only(two_ranks: Ranks, tmp_path: Path) -> None:
    """Masters follow the published weights, as in stock: DeepSpeed reads no others from a checkpoint of ZeRO-3."""
    two_ranks.run(train_and_save, "bf16", "ours", str(tmp_path), 4, 4)
    (stock, *_), *_ = two_ranks.run(load_and_train, "bf16", "stock", str(tmp_path), 4, 4, load_module_only=True)
    for form in ("fp32", "split"):
        (ours, *_), *_ = two_ranks.run(
            load_and_train, "bf16", "ours", str(tmp_path), 4, 4, FORMS[form], load_module_only=True
        )
        assert distance(stock, ours) == 0.0, form


State = dict[str, tuple[Tensor, ...]]


def state_of(engine: Any) -> State:
    """Master and moments by name."""
    from deepspeed.utils import safe_get_full_optimizer_state

    moments = {
        name: [safe_get_full_optimizer_state(param, key).clone() for key in ("exp_avg", "exp_avg_sq")]
        for name, param in engine.module.named_parameters()
    }
    return {name: (master, *moments[name]) for name, master in masters(engine).items()}


def save_for_tools(folder: str, form: str) -> State:
    scenario = SCENARIOS["bf16"]
    zero = {**scenario.config["zero"], "stage3_gather_16bit_weights_on_model_save": True}
    configured = Scenario({**scenario.config, "zero": zero})
    offload, options = WAYS["ours, later"]
    engine = configured.engine(offload, {**(options or {}), **FORMS[form]})
    configured.train(engine, range(4))
    assert engine.save_16bit_model(folder, "weights.bin")
    engine.save_checkpoint(folder, tag="saved")
    found = state_of(engine)
    end(engine)
    return found


def load_universal(folder: str, form: str) -> tuple[State, list[int]]:
    scenario = SCENARIOS["bf16"]
    configured = Scenario({**scenario.config, "checkpoint": {"load_universal": True}})
    offload, options = WAYS["ours"]
    engine = configured.engine(offload, {**(options or {}), **FORMS[form]})
    configured.train(engine, range(50, 52))
    engine.load_checkpoint(folder, tag="universal")
    found, steps = state_of(engine), list(engine.optimizer.parts.driver.steps)
    configured.train(engine, range(4, 6))  # trains on
    end(engine)
    return found, steps


def test_deepspeeds_tools(two_ranks: Ranks, tmp_path: Path) -> None:
    """Weights in 16 bit and in fp32, and universal checkpoints, which another number of ranks loads."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    one_rank = Ranks(1)
    try:
        for form in ("fp32", "8bit+split"):
            folder = tmp_path / form[:4]  # DeepSpeed's tool cannot parse a path with "+"
            expected = two_ranks.run(save_for_tools, str(folder), form)[0]
            halves = torch.load(folder / "weights.bin")
            consolidated = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag="saved")
            make_universal(folder)
            found, steps = one_rank.run(load_universal, str(folder), form)[0]
            assert set(consolidated) == set(expected)
            assert set(steps) == {4}
            for name, (master, *moments) in expected.items():
                assert torch.equal(consolidated[name].float(), master)
                assert form != "fp32" or torch.equal(halves[name], master.bfloat16())  # ties: away from zero if split
                assert torch.equal(found[name][0], master)
                if form == "fp32":  # others are rounded anew, in blocks of another partition
                    assert all(torch.equal(a, b) for a, b in zip(found[name][1:], moments, strict=True))
    finally:
        one_rank.close()
