"""Checkpoints of split masters have whole ones, which any optimizer loads, with every bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW, checkpoints
from superoffload.checkpoints import tensor_files
from superoffload.optimizer import state_dict
from tests.support.adamw_training import Reordered, TorchAdamW, model_of, train
from tests.support.saved_runs import Carry, as_dict, in_a_folder, in_the_background, through_a_file
from tests.support.split_masters import (
    SPLIT,
    assert_split,
    away,
    bits_of,
    same_bits,
    same_states,
    shard_of,
    state_of,
    tied,
)


@pytest.fixture(autouse=True)
def _many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are written, read and loaded in several blocks, as large ones are."""
    monkeypatch.setattr(state_dict, "_BLOCK", 100)
    monkeypatch.setattr(tensor_files, "_RUN", 512)


def given_step(model: nn.Module, optimizer: AdamW, seed: int) -> None:
    """With gradients that do not depend on parameters, which are rounded in two ways at ties."""
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).bfloat16()
    optimizer.step()


def published(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def rounded(optimizer: AdamW, kind: str) -> list[Tensor]:
    masters = [state["master"] for state in optimizer.state.values()]
    return [away(master) if kind == "split" else master.bfloat16() for master in masters]


@pytest.mark.parametrize(
    ("carry", "first", "second", "stepped"),
    [
        (as_dict, "split", "fp32", True),
        (through_a_file, "fp32", "split", False),
        (in_a_folder, "fp32", "split", True),
        (in_the_background, "split", "split", False),
    ],
)
def test_every_bit_of_masters_at_ties_is_carried(
    carry: Carry, first: str, second: str, stepped: bool, tmp_path: Path
) -> None:
    """Published is the even neighbour, as torch has converted it, or what this kind of masters is rounded to."""
    model, other = model_of(torch.bfloat16), model_of(torch.bfloat16, seed=4)
    with (
        AdamW(model.parameters(), model=model, lr=1e-2, threads=1, master_dtype=first) as saved,
        AdamW(other.parameters(), threads=1, bucket_numel=1024, master_dtype=second) as loaded,
    ):
        train(model, saved, range(2))
        train(other, loaded, range(3))
        tied(saved, model)
        if stepped:
            saved.param_groups[0].update(lr=0.0)
            given_step(model, saved, 1)
            assert all(map(same_bits, published(model), rounded(saved, first)))
        masters = state_of(saved)
        carry(model, saved, other, loaded, tmp_path)
        assert same_states(state_of(loaded), masters)
        if stepped:
            assert all(map(same_bits, published(model), published(other)))
        loaded.refresh_masters()
        assert same_states(state_of(loaded), masters), "they are those of the parameters of either rounding"
        for group in (*saved.param_groups, *loaded.param_groups):
            group["lr"] = 1e-2
        given_step(model, saved, 2)
        given_step(other, loaded, 2)
        assert same_states(state_of(loaded), state_of(saved))
        assert all(map(same_bits, published(other), rounded(loaded, second)))


def test_parameters_in_another_order_of_memory(tmp_path: Path) -> None:
    """A file has the order of their dimensions, also where upper halves are in several buckets."""
    model, other = Reordered(channels=600), Reordered(channels=600)
    with AdamW(model.parameters(), threads=1, bucket_numel=1024, lr=1e-2, **SPLIT) as optimizer:
        train(model, optimizer, range(3))
        assert any(len(upper.parts) > 1 for upper in (shard.upper for shard in optimizer._engine.shards) if upper)
        checkpoints.save(tmp_path / "a", model, optimizer)
        weight: Any = other.conv.weight
        weight.data = weight.detach().contiguous()
        with AdamW(other.parameters(), threads=1) as whole:
            checkpoints.load(tmp_path / "a", other, whole)
            assert same_states(state_of(whole), state_of(optimizer))
            assert all(map(same_bits, published(model), published(other)))


def test_state_of_torchs_own_adamw() -> None:
    """It has no masters and moments in bf16: the parameters are the masters. One of them has no state."""
    model, other = model_of(torch.bfloat16), model_of(torch.bfloat16, seed=4)
    theirs = TorchAdamW(model.parameters(), lr=1e-2)
    first = next(model.parameters()).requires_grad_(False)
    train(model, theirs, range(3))
    with AdamW(other.parameters(), threads=1, **SPLIT) as ours:
        train(other, ours, range(2))
        assert shard_of(ours, next(other.parameters())).master.any()
        ours.load_state_dict(theirs.state_dict())
        other.load_state_dict(model.state_dict())
        ours.refresh_masters()
        for param, mine in zip(model.parameters(), other.parameters(), strict=True):
            state = ours.state[mine]
            assert same_bits(state["master"], param.detach().float()) and not shard_of(ours, mine).master.any()
            if param is first:
                assert state["step"] == 0 and not bits_of(state["exp_avg"]).any()
            else:
                assert same_bits(state["exp_avg"], theirs.state[param]["exp_avg"].float())
        train(other, ours, range(3, 5))
        assert_split(ours)
        theirs.load_state_dict(ours.state_dict())
        assert all(set(values) >= {"step", "exp_avg", "exp_avg_sq"} for values in theirs.state.values())
