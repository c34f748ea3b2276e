"""Checkpoints of models on meshes and in pipeline stages: other layouts load them."""

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
from tests.support.meshes import LAYOUTS, everything, laid_out, loss_of, options_of, rows, whole_model
from tests.support.pipelines import WAYS, Pipeline, is_tied, whole_of
from tests.support.rank_processes import error_of, on_ranks

Contents = dict[str, Tensor]
FROZEN = "blocks.0.up.weight"  # frozen, so that a DTensor without state is saved too


def made(name: str, seed: int) -> tuple[nn.Module, AdamW]:
    """The model over the ranks, or whole in one process (``""``), and its optimizer."""
    model: nn.Module = laid_out(LAYOUTS[name], seed=seed) if name else whole_model(LAYOUTS["tp2"], seed=seed)
    dict(model.named_parameters())[FROZEN].requires_grad_(False)
    named = [(key, param) for key, param in model.named_parameters() if param.requires_grad]
    return model, AdamW(named, **options_of(model, {"max_grad_norm": 1.0}))


def steps(model: nn.Module, optimizer: AdamW, name: str, seeds: range) -> None:
    for seed in seeds:
        optimizer.zero_grad()
        loss_of(model, seed, rows(LAYOUTS[name], dist.get_rank())).backward()
        optimizer.step()


def assert_equal(found: Contents, expected: Contents) -> None:
    assert set(found) == set(expected)
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def save(name: str, folder: str) -> tuple[Contents, Contents]:
    """All state when it was saved, by us, by torch and as masters alone, and three steps later."""
    model, optimizer = made(name, 0)
    with optimizer:
        steps(model, optimizer, name, range(3))
        saved = everything(model.named_parameters(), optimizer)
        parameters, state = get_state_dict(model, optimizer)
        state_dict_saver.save({"model": parameters, "optimizer": state}, checkpoint_id=f"{folder}/dcp")
        checkpoints.export_weights(f"{folder}/masters", model, optimizer, masters=True)
        saving = checkpoints.save_in_background(f"{folder}/ours", model, optimizer, memory=0)
        steps(model, optimizer, name, range(3, 6))
        saving.wait(60)
        return saved, everything(model.named_parameters(), optimizer)


def load(name: str, folder: str, by_torch: bool) -> tuple[Contents, Contents]:
    model, optimizer = made(name, 7)
    with optimizer:
        steps(model, optimizer, name, range(20, 21))
        if by_torch:
            parameters, state = get_state_dict(model, optimizer)
            content: dict[str, Any] = {"model": parameters, "optimizer": state}
            state_dict_loader.load(content, checkpoint_id=f"{folder}/dcp")
            set_state_dict(model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"])
        else:
            checkpoints.load(f"{folder}/ours", model, optimizer)
        loaded = everything(model.named_parameters(), optimizer)
        steps(model, optimizer, name, range(3, 6))
        return loaded, everything(model.named_parameters(), optimizer)


def test_any_layout_loads_what_any_other_saved(tmp_path: Path) -> None:
    """Also torch.distributed.checkpoint, and one file of masters."""
    first, folder = "fsdp2 x tp2", str(tmp_path)
    results = on_ranks(4, save, first, folder)
    saved, later = results[0]
    for other, _ in results:
        assert_equal(other, saved)
    for then, by_torch in ((first, False), ("tp4", False), ("hsdp2x1 x tp2", False), ("tp2 sp", True)):
        for loaded, after in on_ranks(LAYOUTS[then].ranks, load, then, folder, by_torch):
            assert_equal(loaded, saved)
            if then == first:
                assert_equal(after, later)
    model, optimizer = made("", 7)
    with optimizer:
        checkpoints.load(tmp_path / "ours", model, optimizer)
        assert_equal(everything(model.named_parameters(), optimizer), saved)
    exported = load_file(tmp_path / "masters" / "model.safetensors")
    assert set(exported) == {key for key in saved if " " not in key}
    for key, value in exported.items():
        assert torch.equal(value.double(), saved.get(f"master {key}", saved[key]))


def experts(name: str, folder: str, saves: bool) -> Contents:
    model = laid_out(LAYOUTS[name], seed=0 if saves else 7)
    with AdamW(model.parameters(), **options_of(model, {})) as optimizer:
        steps(model, optimizer, name, range(1))
        (checkpoints.save if saves else checkpoints.load)(folder, model, optimizer)
        return everything(model.named_parameters(), optimizer)


def test_experts_move_between_meshes(tmp_path: Path) -> None:
    saved, *_ = on_ranks(2, experts, "ep2", str(tmp_path / "a"), True)
    for loaded in on_ranks(4, experts, "fsdp2 x ep2", str(tmp_path / "a"), False):
        assert_equal(loaded, saved)


def trained(way: str, folder: str, saves: bool) -> tuple[Contents, Contents, str]:
    """All state of this rank at the checkpoint, and three steps later; what is said of an export of a stage."""
    pipeline = Pipeline(way, seed=0 if saves else 7)
    with AdamW(pipeline.named(), **options_of(pipeline.stage, {"max_grad_norm": 1.0})) as optimizer:

        def steps(seeds: range) -> None:
            for seed in seeds:
                optimizer.zero_grad()
                pipeline.backward(seed, pipeline.part)
                optimizer.step()

        steps(range(3) if saves else range(20, 21))
        if saves:
            checkpoints.save(f"{folder}/step-3", pipeline.stage, optimizer, extra={"step": 3})
        else:
            assert checkpoints.load(f"{folder}/step-3", pipeline.stage, optimizer) == {"step": 3}
        at_once = everything(pipeline.named(), optimizer)
        steps(range(3, 6))
        error = error_of(lambda: checkpoints.export_weights(f"{folder}/weights", pipeline.stage, optimizer))
        return at_once, everything(pipeline.named(), optimizer), error


def assert_part(found: Contents, expected: Contents) -> None:
    assert found and set(found) <= set(expected)
    for key, value in found.items():
        assert torch.equal(value, expected[key]), key


@pytest.mark.parametrize(
    ("first", "then"), [("pp2 x tp2", ["pp2 x tp2", "pp2 x fsdp2"]), ("pp2 x fsdp2 tied", ["pp2 tied"])]
)
def test_stages_load_what_stages_saved(first: str, then: list[str], tmp_path: Path) -> None:
    assert all(is_tied(way) == is_tied(first) for way in then)
    results = on_ranks(WAYS[first], trained, first, str(tmp_path), True)
    saved: Contents = {key: value for at_once, *_ in results for key, value in at_once.items()}
    later: Contents = {key: value for _, after, _ in results for key, value in after.items()}
    for *_, error in results:
        assert "each rank has a part of it" in error and "load() it into the whole model in one process" in error
    assert not (tmp_path / "weights").exists()
    model = whole_of(first, seed=9)
    with AdamW(model.named_parameters(), **options_of(model, {})) as optimizer:
        checkpoints.load(tmp_path / "step-3", model, optimizer)
        alone = everything(model.named_parameters(), optimizer)
    assert set(alone) == set(saved)
    assert_part(alone, saved)
    for way in then:
        for at_once, after, _ in on_ranks(WAYS[way], trained, way, str(tmp_path), False):
            assert_part(at_once, saved)
            if way == first:
                assert_part(after, later)
