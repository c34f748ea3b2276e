"""Checkpoints of pipeline stages: each rank has a part of the model, and the checkpoint is of the whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from superoffload import AdamW, checkpoints
from tests.support.meshes import everything, options_of
from tests.support.pipelines import WAYS, Pipeline, is_tied, whole_of
from tests.support.rank_processes import error_of, on_ranks

Contents = dict[str, Tensor]


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
