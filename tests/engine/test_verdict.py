"""The verdict: torch's clip, found-inf, and a fold whose order does not depend on anything."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from superoffload import _native
from superoffload.engine.bucket import BLOCK
from superoffload.engine.verdict import decide
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


def block_sums(gradient: torch.Tensor) -> float:
    sums = np.zeros(-(-gradient.numel() // BLOCK))
    packed = torch.empty_like(gradient)
    _native.pack(gradient.data_ptr(), packed.data_ptr(), _native.ElementType.f32, gradient.numel(), sums.ctypes.data)
    return _native.fold_sums([(sums.ctypes.data, len(sums))])[0]


@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=6),
    st.floats(1e-3, 1e3),
    st.floats(-6, 6),
    st.integers(0, 2**32 - 1),
)
def test_equal_to_torch_clip_grad_norm(sizes: list[int], max_grad_norm: float, exponent: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    gradients = [10.0**exponent * torch.randn(size, generator=generator) for size in sizes]
    parameters = [torch.zeros(size, dtype=torch.float64) for size in sizes]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.double()
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm))
    verdict = decide([block_sums(gradient) for gradient in gradients], max_grad_norm=max_grad_norm)
    assert verdict.grad_norm == pytest.approx(norm, rel=1e-14)
    clipped = torch.cat([parameter.grad for parameter in parameters if parameter.grad is not None])
    before = torch.cat(gradients).double()
    place = int(before.abs().argmax())
    assume(before[place] != 0)
    assert verdict.clip_coefficient == pytest.approx(float(clipped[place] / before[place]), rel=1e-14)
