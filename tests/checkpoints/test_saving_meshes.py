"""Checkpoints of DTensors on any mesh: each layout's loads into every other, and resumes with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from superoffload import AdamW, checkpoints
from tests.support.meshes import LAYOUTS, laid_out, loss_of, options_of, rows, whole, whole_model
from tests.support.rank_processes import on_ranks

Contents = dict[str, Tensor]
FROZEN = "blocks.0.up.weight"  # frozen, so that a DTensor without state is saved too


def made(name: str, seed: int) -> nn.Module:
    """The model over the ranks, or whole in one process (``""``)."""
    model: nn.Module = laid_out(LAYOUTS[name], seed=seed) if name else whole_model(LAYOUTS["tp2"], seed=seed)
    dict(model.named_parameters())[FROZEN].requires_grad_(False)
    return model


def optimizer_of(model: nn.Module, **options: Any) -> AdamW:
    named = [(key, param) for key, param in model.named_parameters() if param.requires_grad]
    return AdamW(named, **options_of(model, {"max_grad_norm": 1.0, **options}))


def step(model: nn.Module, optimizer: AdamW, seed: int, part: int) -> None:
    optimizer.zero_grad()
    loss_of(model, seed, part).backward()
    optimizer.step()


def everything(model: nn.Module, optimizer: AdamW) -> Contents:
    """All state, gathered, by name and kind."""
    found = {}
    for name, param in model.named_parameters():
        found[name] = whole(param)
        for key, value in optimizer.state.get(param, {}).items():
            found[f"{key} {name}"] = whole(value)
    return found


def assert_equal(found: Contents, expected: Contents) -> None:
    assert set(found) == set(expected)
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def save(name: str, folder: str, background: bool) -> tuple[Contents, Contents]:
    """All state when it was saved, and three steps later."""
    model, part = made(name, 0), rows(LAYOUTS[name], dist.get_rank())
    with optimizer_of(model) as optimizer:
        for seed in range(3):
            step(model, optimizer, seed, part)
        saved = everything(model, optimizer)
        if background:
            saving = checkpoints.save_in_background(f"{folder}/ours", model, optimizer, memory=0)
        else:
            checkpoints.save(f"{folder}/ours", model, optimizer)
        for seed in range(3, 6):
            step(model, optimizer, seed, part)
        if background:
            saving.wait(60)
        return saved, everything(model, optimizer)


def load(name: str, folder: str) -> tuple[Contents, Contents]:
    model, part = made(name, 7), rows(LAYOUTS[name], dist.get_rank())
    with optimizer_of(model) as optimizer:
        step(model, optimizer, 20, part)
        checkpoints.load(f"{folder}/ours", model, optimizer)
        loaded = everything(model, optimizer)
        for seed in range(3, 6):
            step(model, optimizer, seed, part)
        return loaded, everything(model, optimizer)


def load_alone(folder: str) -> Contents:
    model = made("", 7)
    with optimizer_of(model) as optimizer:
        checkpoints.load(f"{folder}/ours", model, optimizer)
        return everything(model, optimizer)


DENSE = ["fsdp2 x tp2", "tp4", "hsdp2x1 x tp2"]


@pytest.mark.parametrize("first", ["fsdp2 x tp2", "tp4"])
def test_any_layout_loads_what_any_other_saved(first: str, tmp_path: Path) -> None:
    results = on_ranks(LAYOUTS[first].ranks, save, first, str(tmp_path), first == "tp4")
    saved, later = results[0]
    for other, _ in results:
        assert_equal(other, saved)
    for then in DENSE if first == DENSE[0] else DENSE[:2]:
        for loaded, after in on_ranks(LAYOUTS[then].ranks, load, then, str(tmp_path)):
            assert_equal(loaded, saved)
            if then == first:
                assert_equal(after, later)
    assert_equal(load_alone(str(tmp_path)), saved)


def experts(name: str, folder: str, saves: bool) -> Contents:
    model, part = laid_out(LAYOUTS[name], seed=0 if saves else 7), rows(LAYOUTS[name], dist.get_rank())
    with AdamW(model.parameters(), **options_of(model, {})) as optimizer:
        step(model, optimizer, 0, part)
        (checkpoints.save if saves else checkpoints.load)(folder, model, optimizer)
        return everything(model, optimizer)


def test_experts_move_between_meshes(tmp_path: Path) -> None:
    saved, *_ = on_ranks(2, experts, "ep2", str(tmp_path / "a"), True)
    for loaded in on_ranks(4, experts, "fsdp2 x ep2", str(tmp_path / "a"), False):
        assert_equal(loaded, saved)


# ---- torch.distributed.checkpoint, and one file -------------------------------------------------------------------


def save_by_torch(name: str, folder: str) -> Contents:
    model, part = made(name, 0), rows(LAYOUTS[name], dist.get_rank())
    with optimizer_of(model) as optimizer:
        for seed in range(2):
            step(model, optimizer, seed, part)
        parameters, state = get_state_dict(model, optimizer)
        state_dict_saver.save({"model": parameters, "optimizer": state}, checkpoint_id=f"{folder}/dcp")
        checkpoints.export_weights(f"{folder}/masters", model, optimizer, masters=True)
        return everything(model, optimizer)


def load_by_torch(name: str, folder: str) -> Contents:
    model, part = made(name, 7), rows(LAYOUTS[name], dist.get_rank())
    with optimizer_of(model) as optimizer:
        step(model, optimizer, 20, part)
        parameters, state = get_state_dict(model, optimizer)
        content: dict[str, Any] = {"model": parameters, "optimizer": state}
        state_dict_loader.load(content, checkpoint_id=f"{folder}/dcp")
        set_state_dict(model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"])
        return everything(model, optimizer)


def test_torch_saves_and_loads_them_too(tmp_path: Path) -> None:
    first = "fsdp2 x tp2"
    saved, *_ = on_ranks(LAYOUTS[first].ranks, save_by_torch, first, str(tmp_path))
    exported = load_file(tmp_path / "masters" / "model.safetensors")
    for key, value in exported.items():
        assert torch.equal(value.double(), saved.get(f"master {key}", saved[key]))
    assert set(exported) == {key for key in saved if " " not in key}
    for then in ("tp2 sp", "fsdp4 x tp1"):
        for loaded in on_ranks(LAYOUTS[then].ranks, load_by_torch, then, str(tmp_path)):
            assert_equal(loaded, saved)
