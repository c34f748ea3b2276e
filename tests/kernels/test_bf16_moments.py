"""bfloat16 moments with stochastic rounding: the reference's bits, exact undo, no bias."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from superoffload import kernels
from tests.support import kernel_inputs as cases
from tests.support.guarded_arrays import GuardedSpan, assert_bits, assert_state, each_isa
from tests.support.kernel_inputs import State
from tests.support.reference import adam
from tests.support.reference.adam import Hyper, Stepped
from tests.support.reference.convert import narrow, widen
from tests.support.reference.fma import fma
from tests.support.reference.stochastic import RandomWords, noise

STREAM = (11 << 32) | 3


def hyper(step: int, factor: float = 1.0, *, l2: bool = False) -> Hyper:
    return Hyper(1e-3, 0.9, 0.999, 1e-8, 0.01, step, factor, l2)


def zeros(numel: int) -> State:
    master = np.random.default_rng(5).standard_normal(numel).astype(np.float32)
    return State(master, np.zeros(numel, np.uint16), np.zeros(numel, np.uint16))


def stepped(old: State, gradient: NDArray[np.uint16], of: Hyper, published: str = "bf16", first: int = 0) -> Stepped:
    return adam.step(*old, gradient, published, of, noise(gradient.size, STREAM, of.step, first))


def elements_that_show(
    right: NDArray[np.float32], wrong: NDArray[np.float32], random16: RandomWords
) -> NDArray[np.intp]:
    """For each pair of values an element whose noise rounds one of them up and the other down; -1: there is none."""
    element_with = np.full(1 << 16, -1, np.intp)
    element_with[random16] = np.arange(len(random16))
    larger = np.maximum(right.view(np.uint32), wrong.view(np.uint32)) & np.uint32(0xFFFF)
    differ = (right.view(np.uint32) != wrong.view(np.uint32)) & (larger != 0)
    return np.where(differ, element_with[(0x10000 - larger) & 0xFFFF], -1)


@each_isa
@pytest.mark.parametrize("moment", ["exp_avg", "exp_avg_sq"])
def test_the_last_bit_before_rounding_is_right(isa: str, moment: str) -> None:
    """Stochastic rounding hides it in nearly every element: values are put where the noise shows it. What rounding
    beta1 cuts off counts, and the gradient is squared first."""
    f, old = np.float32, zeros(1 << 16)
    m, g = (narrow(cases.ranged(2000, seed, -2, 1), "bf16") for seed in (1, 2))
    random = noise(1 << 16, STREAM, 4)
    if moment == "exp_avg":
        rest = f(0.9 - float(f(0.9))) * widen(m)
        beta1, share = np.full_like(rest, f(0.9)), np.full_like(rest, f(1 - 0.9))
        right, wrong = (fma(beta1, widen(m), fma(share, widen(g), part)) for part in (rest, 0 * rest))
        at = elements_that_show(right, wrong, random & np.uint32(0xFFFF))
        old.exp_avg[at[at >= 0]] = m[at >= 0]
    else:
        share = f(1 - 0.999)
        right, wrong = share * (widen(g) * widen(g)), (share * widen(g)) * widen(g)
        at = elements_that_show(right, wrong, random >> np.uint32(16))
    assert (at >= 0).sum() > 100
    gradient = np.zeros(1 << 16, np.uint16)
    gradient[at[at >= 0]] = g[at >= 0]
    with kernels.using_isa(isa):
        guarded = GuardedSpan(old, gradient, "bf16", noise_stream=STREAM)
        guarded.span.step(hyper(4))
    guarded.expect(stepped(old, gradient, hyper(4)), moment)


@each_isa
@pytest.mark.parametrize("published", ["bf16", "split"])
@pytest.mark.parametrize("kind", cases.KINDS)
def test_every_way_to_step_is_the_reference(isa: str, published: str, kind: str) -> None:
    """Whole masters and split ones, of many lengths and alignments, with indexes of the noise that wrap around."""
    for number, length in enumerate((*cases.LENGTHS[:131:7], *cases.LENGTHS[131::2])):
        first, width, start = number % 2 * (2**32 - 20) + number, 1 + number % 2, number % 5
        h = hyper(1 + number, l2=number % 3 == 0)
        clipped = hyper(1 + number, 0.25, l2=h.l2)
        fp32 = cases.state(kind, length, 600 + number)
        old = State(fp32.master, *(narrow(moment, "bf16") for moment in fp32[1:]))
        gradient = cases.gradient(kind, "bf16", length, 700 + number)
        after, context = stepped(old, gradient, h, published, first), f"length {length}"
        with kernels.using_isa(isa):
            guarded = GuardedSpan(old, gradient, published, start, noise_stream=STREAM, first_index=first)
            stored = guarded.remainders.copy()
            assert guarded.span.step_journaled(h, width)
            guarded.expect(after, f"journaled step, {context}")
            guarded.span.undo()
            assert_state(guarded.state, old, f"undo, {context}")
            guarded.span.publish(h)
            assert_bits("shadow", guarded.shadow, after.shadow, f"publish, {context}")
            assert_bits("masters or remainders", guarded.remainders, stored, f"publish, {context}")
            guarded.span.settle(h)
            guarded.expect(after, f"settle, {context}")
            guarded = GuardedSpan(old, gradient, published, start, noise_stream=STREAM, first_index=first)
            assert guarded.span.step_journaled(h, width)
            guarded.span.replay(clipped)
            guarded.expect(stepped(old, gradient, clipped, published, first), f"replay, {context}")


def test_rounding_has_no_bias() -> None:
    """With round to nearest exp_avg_sq would stand still here: each step changes it by less than half a unit."""
    numel = 1 << 16
    old = zeros(numel)
    ones: Any = np.full(numel, 0x3F80, np.uint16)
    guarded = GuardedSpan(State(old.master, ones, ones), np.zeros(numel, np.uint16), "bf16", noise_stream=STREAM)
    guarded.span.step(hyper(1000))
    spread = 2.0**-8 / np.sqrt(numel)  # standard error of the mean is below this
    assert abs(widen(guarded.state.exp_avg_sq).astype(np.float64).mean() - 0.999) < 5 * spread
    assert abs(widen(guarded.state.exp_avg).astype(np.float64).mean() - 0.9) < 5 * spread
