"""DTensors in any layout: tensor parallel, sharded twice, replicated, experts on a mesh of their own. Ranks with other
parameters: pipeline stages, sharded or cut inside, with tied embeddings. One verdict."""

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
from tests.support import pipelines
from tests.support.meshes import LAYOUTS, laid_out, loss_of, options_of, rows, train, train_alone, whole_model
from tests.support.pipelines import WAYS, Pipeline, whole_of
from tests.support.rank_faults import FAULTS, assert_found, first_error
from tests.support.rank_processes import error_of, on_ranks


def both_ways(name: str, **options: Any) -> list[Any]:
    run = pipelines.train if name in WAYS else train
    return [run(name, speculation=mode, **options) for mode in ("always", "never")]


# tp4 and fsdp4 x tp1 have no layout of their own: each cut is in another one, by two ranks; so is that of ep2
USED = ["tp2 sp", "fsdp2 x tp2", "hsdp2x1 x tp2", "fsdp2 x ep2"]


@pytest.mark.parametrize("name", [*USED, *WAYS])
def test_it_trains_like_one_process_whatever_is_speculated(name: str) -> None:
    """Sums over ranks are in another order, so the last bits differ from those of one process."""
    if name == "fsdp2 x tp2":
        for speculative, synchronous in on_ranks(4, partial(both_ways, dtype=torch.bfloat16), name):
            assert_same(speculative, synchronous)
    if name in WAYS:
        count, alone = WAYS[name], train_alone(whole_of(name), range(2 if "fsdp2" in name else 1))
    else:
        layout = LAYOUTS[name]
        count, parts = layout.ranks, sorted({rows(layout, rank) for rank in range(layout.ranks)})
        alone = train_alone(whole_model(layout), parts)
    results, seen = on_ranks(count, both_ways, name), set()
    for speculative, one in results:
        assert_same(speculative, one, tied="tied" in name)
        assert one.norms == results[0][0].norms, "one verdict"
        assert one.norms == pytest.approx(one.in_double, rel=1e-9)
        assert one.norms == pytest.approx(alone.norms, rel=1e-5)
        seen |= set(one.masters)
        for key, master in one.masters.items():
            torch.testing.assert_close(master, alone.masters[key], rtol=0, atol=3e-5)
    assert seen == set(alone.masters)


def assert_same(speculative: Any, synchronous: Any, tied: bool = False) -> None:
    assert speculative.digests == synchronous.digests and speculative.digests
    assert speculative.norms == synchronous.norms
    stats = speculative.stats
    assert stats["steps"] == 5 and stats["skipped_steps"] == 1
    # Gradients of tied ones are reduced by hand, which is an edit of their bucket.
    assert tied or (stats["buckets_committed"] and stats["buckets_replayed"])


FOUND = [  # on the last rank
    ("fsdp2 x tp2", "skip_publish", "rank 3: blocks.0.norm.weight: the published parameter is not round(master)"),
    ("tp2 sp", "swap_mesh_shards", "blocks.0.down.weight: the published parameter is not round(master)"),
    ("tp2 sp", "drop_clip", "rank 1: "),
    ("tp2 sp", "one_summand", "norm.weight: its gradient differs from that of rank"),
    ("fsdp2 x ep2", "stale_parameters", "what its forward reads is not what rank"),
    ("pp2 x fsdp2", "skip_publish", "rank 3: blocks.1."),
    ("pp2 x tp2", "apply_twice", "rank 3: blocks.1.norm.weight: its "),
    ("pp2 x fsdp2 tied", "one_summand", "rank 3: embedding.weight: its gradient differs from that of rank 1"),
    ("pp2 x fsdp2", "no_gradient", "not the same parameters have a gradient: rank 3: norm.bias is False"),
]


def train_until_error(name: str, fault: str, step: int) -> list[Any]:
    rank, model, plain_backward = dist.get_world_size() - 1, *made(name)
    named: dict[str, Any] = dict(model.named() if isinstance(model, Pipeline) else model.named_parameters())
    whole: Any = model.stage if isinstance(model, Pipeline) else model

    def backward(number: int) -> None:
        if fault == "stale_parameters" and number == step:
            whole.set_reshard_after_backward(False)
        plain_backward(number)
        if number == step and dist.get_rank() == rank:
            if fault == "one_summand":  # as if this rank's sum lacked that of another
                local_of(named["embedding.weight" if "tied" in name else "norm.weight"].grad).mul_(0.5)
            if fault == "no_gradient":
                named["norm.bias"].grad = None

    options, planted = options_of(whole, {"max_grad_norm": 0.5}), FAULTS.get(fault, FAULTS["none"])
    with AdamW(named.items(), **options) as optimizer, planted(optimizer, step, rank):
        return first_error(optimizer, backward, 6)


def made(name: str) -> tuple[Any, Any]:
    """What is trained, and its backward."""
    if name in WAYS:
        pipeline = Pipeline(name, torch.bfloat16)
        return pipeline, lambda number: pipeline.backward(number, pipeline.part)
    layout = LAYOUTS[name]
    model = laid_out(layout, torch.bfloat16)
    return model, lambda number: loss_of(model, number, rows(layout, dist.get_rank())).backward()


@pytest.mark.parametrize(("name", "fault", "text"), FOUND, ids=[f"{name}-{fault}" for name, fault, _ in FOUND])
def test_planted_faults_are_found(name: str, fault: str, text: str) -> None:
    results = on_ranks(WAYS.get(name) or LAYOUTS[name].ranks, train_until_error, name, fault, 2)
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
