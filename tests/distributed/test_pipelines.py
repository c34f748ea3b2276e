"""Ranks with different parameters: pipeline stages, sharded or cut inside, with tied embeddings; one verdict."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from superoffload import AdamW
from superoffload.distributed.ownership import OwnersTable
from superoffload.distributed.rank_checks import Listing, Roster
from superoffload.errors import RankError
from superoffload.host.tensors import local_of
from tests.support.meshes import options_of, train_alone
from tests.support.pipelines import WAYS, Pipeline, train, whole_of
from tests.support.rank_faults import FAULTS, assert_found, first_error
from tests.support.rank_processes import error_of, on_ranks


def both_ways(way: str) -> list[Any]:
    return [train(way, speculation=mode) for mode in ("always", "never")]


@pytest.mark.parametrize("way", WAYS)
def test_it_trains_like_one_process(way: str) -> None:
    """Whatever is speculated. Sums over ranks are in another order, so the last bits differ."""
    alone, seen = train_alone(whole_of(way), range(2 if "fsdp2" in way else 1)), set()
    results = on_ranks(WAYS[way], both_ways, way)
    for speculative, one in results:
        assert speculative.digests == one.digests and speculative.digests
        assert speculative.norms == one.norms == results[0][0].norms, "one verdict"
        assert speculative.stats["steps"] == 5 and speculative.stats["skipped_steps"] == 1
        if "tied" not in way:  # those gradients are reduced by hand, which is an edit of their bucket
            assert speculative.stats["buckets_committed"] and speculative.stats["buckets_replayed"]
        assert one.norms == pytest.approx(one.in_double, rel=1e-9)
        assert one.norms == pytest.approx(alone.norms, rel=1e-5)
        seen |= set(one.masters)
        for key, master in one.masters.items():
            torch.testing.assert_close(master, alone.masters[key], rtol=0, atol=3e-5)
    assert seen == set(alone.masters)


FOUND = [
    ("pp2 x fsdp2", "skip_publish", 3, "rank 3: blocks.1."),
    ("pp2 x tp2", "apply_twice", 3, "rank 3: blocks.1.norm.weight: its "),
    ("pp2 x fsdp2 tied", "one_summand", 3, "rank 3: embedding.weight: its gradient differs from that of rank 1"),
    ("pp2 x fsdp2", "no_gradient", 3, "not the same parameters have a gradient: rank 3: norm.bias is False"),
]


def train_until_error(way: str, fault: str, step: int, rank: int) -> list[Any]:
    pipeline = Pipeline(way, torch.bfloat16)
    named: dict[str, Any] = dict(pipeline.named())

    def backward(number: int) -> None:
        pipeline.backward(number, pipeline.part)
        if number == step and dist.get_rank() == rank:
            if fault == "one_summand":
                local_of(named["embedding.weight"].grad).mul_(0.5)
            if fault == "no_gradient":
                named["norm.bias"].grad = None

    options, planted = options_of(pipeline.stage, {"max_grad_norm": 0.5}), FAULTS.get(fault, FAULTS["none"])
    with AdamW(pipeline.named(), **options) as optimizer, planted(optimizer, step, rank):
        return first_error(optimizer, backward, 6)


@pytest.mark.parametrize(("way", "fault", "rank", "text"), FOUND, ids=[f"{w}-{f}" for w, f, *_ in FOUND])
def test_planted_faults_are_found(way: str, fault: str, rank: int, text: str) -> None:
    results = on_ranks(WAYS[way], train_until_error, way, fault, 2, rank)
    assert_found(results, text, 2, 2)
    assert "step 2" in results[0][1]


def refused() -> list[str]:
    rank = dist.get_rank()
    stage: Any = nn.Linear(3, 4) if rank else nn.Linear(5, 3)
    params, threes = list(stage.parameters()), [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    given: list[Any] = [params, list(zip("wb", params, strict=True)), list(zip("ab", threes, strict=True))[: 1 + rank]]
    return [error_of(partial(AdamW, one, threads=1, rank_timeout=60.0)) for one in given]


def test_parts_that_cannot_be_told_apart_are_refused() -> None:
    first, second = on_ranks(2, refused)
    assert first == second
    several = "Different parameters of one model need different names"
    lacks = "rank 0 lacks b, which rank 1 has, and has nothing that rank 1 lacks"
    for error, words in zip(first, ("made differently", several, lacks), strict=True):
        assert error.startswith("RankError: ranks have diverged: the optimizers were made differently"), error
        assert words in error


def test_a_part_that_no_rank_has_is_named() -> None:
    half, whole = ((0,), (2,)), ((0,), (4,))
    a, b, c = (Listing(name, (4,), 4, "plain", ((4,), "torch.float32", 0)) for name in "abc")
    with pytest.raises(RankError, match=r"only rank 0 has a: indices 2 to 3 of dimension 0 are in no part"):
        Roster({0: [a, b], 1: [c, b]}, {0: [half, whole], 1: [whole, whole]}, OwnersTable())
