"""The verdict: the reference's clip, found-inf, and a fold whose order does not depend on anything. When the part of
the norm that is known proves a clip, nothing more is speculated."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from superoffload import AdamW
from superoffload.engine.verdict import decide
from tests.support.fake_cuda import on_host
from tests.support.reference import adam as reference

SUMS = st.lists(st.floats(0, 1e30), max_size=8)
THRESHOLDS = st.one_of(st.none(), st.floats(1e-6, 1e6))


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_sum_or_a_norm_that_is_not_finite_skips_the_step(max_grad_norm: float | None) -> None:
    for sums in ([1.0, math.inf, 2.0], [math.nan], [1.0, math.nan], [1e308, 1e308]):
        verdict = decide(sums, max_grad_norm=max_grad_norm)
        assert verdict.found_inf and verdict.grad_norm == math.inf
        assert verdict.clip_coefficient == 1.0, "a skipped step is not a clipped one"
    for unscale in (math.inf, -math.inf, math.nan, 1e300):
        assert decide([1e30], unscale=unscale, max_grad_norm=max_grad_norm).found_inf


def test_shards_are_folded_in_their_order() -> None:
    """Each of the small ones is lost when it is added to 1, all together are not."""
    sums = [1.0] + 4096 * [2.0**-53]
    total = 0.0
    for value in sums:
        total += value
    assert decide(sums).grad_norm == math.sqrt(total)
    assert decide(sums).grad_norm != decide(sums[::-1]).grad_norm


@given(SUMS, THRESHOLDS, st.one_of(st.sampled_from([0.0, -0.0]), st.floats(-1e3, 1e3)))
def test_formula(sums: list[float], max_grad_norm: float | None, unscale: float) -> None:
    verdict = decide(sums, unscale=unscale, max_grad_norm=max_grad_norm)
    # Block sums of one block each: the reference folds a shard, then the shards.
    expected = reference.verdict([np.array([value]) for value in sums], max_grad_norm, unscale)
    assert verdict.grad_norm == expected.grad_norm
    assert verdict.clip_coefficient == expected.clip_coefficient
    assert verdict.found_inf == expected.found_inf
    assert np.float32(verdict.gradient_factor) == np.float32(expected.gradient_factor)
    assert math.copysign(1.0, verdict.gradient_factor) == math.copysign(1.0, unscale), "of zeros, too"
    assert 0.0 < verdict.clip_coefficient <= 1.0


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
