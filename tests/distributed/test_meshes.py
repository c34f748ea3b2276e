"""DTensors in any layout: tensor parallel, sharded twice, replicated, experts on a mesh of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from superoffload import AdamW
from tests.support.meshes import LAYOUTS, laid_out, loss_of, options_of, rows, train, train_alone, whole_model
from tests.support.rank_faults import FAULTS, assert_found, first_error
from tests.support.rank_processes import on_ranks


def both_ways(name: str, dtype: torch.dtype) -> list[Any]:
    return [train(name, dtype=dtype, speculation=mode) for mode in ("always", "never")]


# tp4 and fsdp4 x tp1 have no layout of their own: each cut is in another one, by two ranks; so is that of ep2
USED = ["tp2 sp", "fsdp2 x tp2", "hsdp2x1 x tp2", "fsdp2 x ep2"]


@pytest.mark.parametrize("name", USED)
def test_it_trains_like_one_process_whatever_is_speculated(name: str) -> None:
    """Sums over ranks are in another order, so the last bits differ from those of one process."""
    if name == "fsdp2 x tp2":
        for speculative, synchronous in on_ranks(4, both_ways, name, torch.bfloat16):
            assert_same(speculative, synchronous)
    layout = LAYOUTS[name]
    alone = train_alone(whole_model(layout), sorted({rows(layout, rank) for rank in range(layout.ranks)}))
    for speculative, synchronous in on_ranks(layout.ranks, both_ways, name, torch.float32):
        assert_same(speculative, synchronous)
        assert synchronous.norms == pytest.approx(synchronous.in_double, rel=1e-9)
        assert synchronous.norms == pytest.approx(alone.norms, rel=1e-5)
        for key, master in alone.masters.items():
            torch.testing.assert_close(synchronous.masters[key], master, rtol=0, atol=3e-5)


def assert_same(speculative: Any, synchronous: Any) -> None:
    assert speculative.digests == synchronous.digests and speculative.digests
    assert speculative.norms == synchronous.norms
    stats = speculative.stats
    assert stats["steps"] == 5 and stats["skipped_steps"] == 1
    assert stats["buckets_committed"] and stats["buckets_replayed"]


FOUND = [
    ("fsdp2 x tp2", "skip_publish", "rank 1: blocks.0.norm.weight: the published parameter is not round(master)"),
    ("tp2 sp", "swap_mesh_shards", "blocks.0.down.weight: the published parameter is not round(master)"),
    ("tp2 sp", "drop_clip", "rank 1: "),
    ("tp2 sp", "one_summand", "norm.weight: its gradient differs from that of rank"),
    ("fsdp2 x ep2", "stale_parameters", "what its forward reads is not what rank"),
]


def train_until_error(name: str, fault: str, step: int, rank: int) -> list[Any]:
    layout = LAYOUTS[name]
    model: Any = laid_out(layout, torch.bfloat16)
    named = dict(model.named_parameters())

    def backward(number: int) -> None:
        if fault == "stale_parameters" and number == step:
            model.set_reshard_after_backward(False)
        loss_of(model, number, rows(layout, dist.get_rank())).backward()
        if fault == "one_summand" and number == step and dist.get_rank() == rank:
            gradient: Any = named["norm.weight"].grad  # as if this rank's sum lacked that of the other
            gradient.to_local().mul_(0.5)

    planted = FAULTS.get(fault, FAULTS["none"])
    with AdamW(named.items(), **options_of(model, {"max_grad_norm": 0.5})) as optimizer, planted(optimizer, step, rank):
        return first_error(optimizer, backward, 6)


@pytest.mark.parametrize(("name", "fault", "text"), FOUND, ids=[f"{name}-{fault}" for name, fault, _ in FOUND])
def test_planted_faults_are_found(name: str, fault: str, text: str) -> None:
    results = on_ranks(LAYOUTS[name].ranks, train_until_error, name, fault, 2, 1)
    assert_found(results, text, 2, 2)
    assert "step 2" in results[0][1]
