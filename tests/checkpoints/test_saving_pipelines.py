"""Checkpoints of pipeline stages: each rank has a part of the model, and the checkpoint is of the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from superoffload import AdamW, checkpoints
from tests.support.meshes import options_of, whole
from tests.support.pipelines import WAYS, Pipeline, is_tied, whole_of
from tests.support.rank_processes import on_ranks
from tests.support.refusal import Refusal

Contents = dict[str, Tensor]


def everything(named: Any, optimizer: AdamW) -> Contents:
    found = {}
    for name, param in named:
        found[name] = whole(param)
        for key, value in optimizer.state[param].items():
            found[f"{key} {name}"] = whole(value)
    return found


def trained(way: str, folder: str, saves: bool) -> tuple[Contents, Contents]:
    """All state of this rank at the checkpoint, and three steps later."""
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
        return at_once, everything(pipeline.named(), optimizer)


def assert_part(found: Contents, expected: Contents) -> None:
    assert found and set(found) <= set(expected)
    for key, value in found.items():
        assert torch.equal(value, expected[key]), key


def load_alone(way: str, folder: str) -> Contents:
    model = whole_of(way, seed=9)
    with AdamW(model.named_parameters(), **options_of(model, {})) as optimizer:
        checkpoints.load(f"{folder}/step-3", model, optimizer)
        return everything(model.named_parameters(), optimizer)


@pytest.mark.parametrize("first", ["pp2 x tp2", "pp2 x fsdp2 tied"])
def test_stages_load_what_stages_saved(first: str, tmp_path: Path) -> None:
    results = on_ranks(WAYS[first], trained, first, str(tmp_path), True)
    saved: Contents = {key: value for at_once, _ in results for key, value in at_once.items()}
    later: Contents = {key: value for _, after in results for key, value in after.items()}
    alone = load_alone(first, str(tmp_path))
    assert set(alone) == set(saved)
    assert_part(alone, saved)
    for then in (way for way in WAYS if is_tied(way) == is_tied(first)):
        for at_once, after in on_ranks(WAYS[then], trained, then, str(tmp_path), False):
            assert_part(at_once, saved)
            if then == first:
                assert_part(after, later)


def export(way: str, folder: str) -> str:
    pipeline = Pipeline(way, seed=0)
    with AdamW(pipeline.named(), **options_of(pipeline.stage, {})) as optimizer, pytest.raises(ValueError) as refused:
        checkpoints.export_weights(folder, pipeline.stage, optimizer)
    return str(refused.value)


@pytest.mark.refused("each rank has a part of it")
def test_a_stage_is_not_exported_as_the_model(refusal: Refusal, tmp_path: Path) -> None:
    for error in on_ranks(2, export, "pp2", str(tmp_path / "weights")):
        refusal.check(error)
        assert "load() it into the whole model in one process" in error
    assert not (tmp_path / "weights").exists()
