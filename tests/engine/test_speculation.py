"""When the part of the norm that is known proves a clip, nothing more is speculated. (Fates: tests/fuzz.)"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from superoffload import AdamW
from tests.support.fake_cuda import on_host


@pytest.fixture
def optimizer() -> Iterator[AdamW]:
    """Of four parameters, each of which has a bucket of its own."""
    params = [torch.nn.Parameter(torch.zeros(1024)) for _ in range(4)]
    with on_host(), AdamW(params, speculation="always", bucket_numel=1024, threads=1) as made:
        yield made


def test_a_partial_norm_that_proves_a_clip_stops_speculation(optimizer: AdamW) -> None:
    optimizer.max_grad_norm = 55.0  # the norm of three gradients of four
    torch.stack([param.sum() for group in optimizer.param_groups for param in group["params"]]).sum().backward()
    optimizer.step()
    stats = optimizer.stats()
    assert stats["buckets_speculated"] == 2 and stats["buckets_committed"] == 0


def test_the_partial_norm_is_of_this_steps_gradients_once_each(optimizer: AdamW) -> None:
    """Of one that comes twice the later, and of none that the step before has left to be delivered."""
    engine, ones = optimizer._engine, torch.ones(1024)
    shards = list(reversed(engine.shards))
    for later in (False, True):
        for shard in shards:
            engine.arrive(shard, ones)
        engine.apply(engine.decide(unscale=1.0, max_grad_norm=None), later=later)
    engine.speculator.expect(unscale=1.0, max_grad_norm=(3.5 * 1024) ** 0.5)  # four would prove a clip
    for shard in shards[:2]:
        engine.arrive(shard, ones)
    before = engine.stats()["buckets_speculated"]
    for _ in range(4):
        engine.retract(shards[1])
        assert engine.speculator.norm.look() == 1024.0
        engine.arrive(shards[1], ones)
    assert engine.stats()["buckets_speculated"] == before + 4
    assert engine.speculator.norm.squares == 2048.0
