"""bfloat16 moments with stochastic rounding: a reference of its own, exact undo, no bias, no dependence on schedule."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from superoffload import kernels
from tests.support.reference.fma import fma
from tests.support.reference.stochastic import RandomWords, noise, stochastic

SEED_STREAM = (11 << 32) | 3


def widen(words: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (words.astype(np.uint32) << 16).view(np.float32)


def narrow(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def hyper(step: int, factor: float = 1.0, *, l2: bool = False) -> kernels.Hyper:
    return kernels.Hyper(1e-3, 0.9, 0.999, 1e-8, 0.01, step, factor, l2)


class State:
    """A span with bf16 moments, and the gradients that drive it."""

    def __init__(self, numel: int, stream: int = SEED_STREAM, first: int = 0) -> None:
        self.random = np.random.default_rng(5)
        self.master = self.random.standard_normal(numel).astype(np.float32)
        self.exp_avg = np.zeros(numel, np.uint16)
        self.exp_avg_sq = np.zeros(numel, np.uint16)
        self.gradient = np.zeros(numel, np.uint16)
        self.shadow = np.zeros(numel, np.uint16)
        self.span = kernels.Span(
            self.master,
            self.exp_avg,
            self.exp_avg_sq,
            self.gradient,
            self.shadow,
            noise_stream=stream,
            first_index=first,
        )

    def next_gradient(self) -> None:
        self.gradient[:] = narrow(self.random.standard_normal(len(self.master)).astype(np.float32))

    def bits(self) -> bytes:
        return b"".join(a.tobytes() for a in (self.master, self.exp_avg, self.exp_avg_sq))


@pytest.fixture(params=kernels.available_isas())
def isa(request: pytest.FixtureRequest) -> str:
    kernels.set_isa(request.param)
    return str(request.param)


def reference_step(state: State, step: int) -> tuple[NDArray[np.uint16], NDArray[np.uint16], NDArray[np.float32]]:
    f = np.float32
    g = widen(state.gradient)
    random = noise(len(g), SEED_STREAM, step)
    rest = f(0.9 - float(f(0.9))) * widen(state.exp_avg)
    m = fma(np.full_like(g, f(0.9)), widen(state.exp_avg), fma(np.full_like(g, f(1 - 0.9)), g, rest))
    v = fma(np.full_like(g, f(0.999)), widen(state.exp_avg_sq), f(1 - 0.999) * (g * g))
    m, v = stochastic(m, random & np.uint32(0xFFFF)), stochastic(v, random >> np.uint32(16))
    correction1, correction2 = 1.0, 1.0
    for _ in range(step):
        correction1, correction2 = correction1 * 0.9, correction2 * 0.999
    inverse = np.full_like(g, f(1 / np.sqrt(1 - correction2)))
    q = m / fma(np.sqrt(v), inverse, np.full_like(g, f(1e-8)))
    decayed = state.master * f(1 - 1e-3 * 0.01)
    return narrow(m), narrow(v), fma(np.full_like(g, -f(1e-3 / (1 - correction1))), q, decayed)


def test_step_is_the_reference_bit_for_bit(isa: str) -> None:
    state = State(3001)
    for step in (1, 2, 4):  # powers of two: here repeated squaring and plain products round alike
        state.next_gradient()
        m, v, master = reference_step(state, step)
        state.span.step(hyper(step))
        np.testing.assert_array_equal(state.exp_avg, m)
        np.testing.assert_array_equal(state.exp_avg_sq, v)
        np.testing.assert_array_equal(state.master.view(np.uint32), master.view(np.uint32))


def elements_that_show(
    right: NDArray[np.float32], wrong: NDArray[np.float32], random16: RandomWords
) -> NDArray[np.intp]:
    """For each pair of values an element whose noise rounds one of them up and the other down; -1: there is none."""
    element_with = np.full(1 << 16, -1, np.intp)
    element_with[random16] = np.arange(len(random16))
    larger = np.maximum(right.view(np.uint32), wrong.view(np.uint32)) & np.uint32(0xFFFF)
    differ = (right.view(np.uint32) != wrong.view(np.uint32)) & (larger != 0)
    return np.where(differ, element_with[(0x10000 - larger) & 0xFFFF], -1)


def expect_reference(state: State, step: int) -> None:
    expected = reference_step(state, step)
    state.span.step(hyper(step))
    np.testing.assert_array_equal(state.exp_avg, expected[0])
    np.testing.assert_array_equal(state.exp_avg_sq, expected[1])
    np.testing.assert_array_equal(state.master.view(np.uint32), expected[2].view(np.uint32))


def test_what_rounding_beta1_cuts_off_counts_with_bf16_moments_too(isa: str) -> None:
    """Stochastic rounding hides the last bit of nearly every element: values are put where the noise shows it."""
    f, state = np.float32, State(1 << 16)
    m, g = (narrow(state.random.standard_normal(2000).astype(f)) for _ in range(2))
    rest = f(0.9 - float(f(0.9))) * widen(m)
    beta1, share = np.full_like(rest, f(0.9)), np.full_like(rest, f(1 - 0.9))
    right, wrong = (fma(beta1, widen(m), fma(share, widen(g), part)) for part in (rest, 0 * rest))
    at = elements_that_show(right, wrong, noise(1 << 16, SEED_STREAM, 4) & np.uint32(0xFFFF))
    assert (at >= 0).sum() > 100
    state.exp_avg[at[at >= 0]], state.gradient[at[at >= 0]] = m[at >= 0], g[at >= 0]
    expect_reference(state, 4)


def test_the_gradient_is_squared_first_with_bf16_moments_too(isa: str) -> None:
    f, state = np.float32, State(1 << 16)
    g = narrow(state.random.standard_normal(2000).astype(f))
    share = f(1 - 0.999)
    right, wrong = share * (widen(g) * widen(g)), (share * widen(g)) * widen(g)
    at = elements_that_show(right, wrong, noise(1 << 16, SEED_STREAM, 4) >> np.uint32(16))
    assert (at >= 0).sum() > 100
    state.gradient[at[at >= 0]] = g[at >= 0]
    expect_reference(state, 4)


@pytest.mark.parametrize("l2", [False, True])
@pytest.mark.parametrize("width", [1, 2])
def test_undo_replay_and_publish_are_exact(isa: str, width: int, l2: bool) -> None:
    state, plain = State(2500), State(2500)
    for step in range(1, 25):
        state.next_gradient()
        plain.gradient[:] = state.gradient
        if step == 20:  # hostile values among the old state and the gradient
            for one in (state, plain):
                one.gradient[:4] = [0x7FC0, 0x7F80, 0x8000, 0x0001]
                one.exp_avg[4:8] = [0x7FC0, 0xFF80, 0x8000, 0x7F7F]
                one.master[8:10] = [np.nan, -0.0]
        before = state.bits()
        assert state.span.step_journaled(hyper(step, l2=l2), width)
        after, shadow = state.bits(), state.shadow.copy()
        state.span.undo()
        assert state.bits() == before
        state.shadow[:] = 0
        state.span.publish(hyper(step, l2=l2))
        np.testing.assert_array_equal(state.shadow, shadow)
        assert state.span.step_journaled(hyper(step, l2=l2), width)
        assert state.bits() == after
        state.span.replay(hyper(step, 0.25, l2=l2))
        plain.span.step(hyper(step, 0.25, l2=l2))
        assert state.bits() == plain.bits()


def test_noise_depends_on_the_place_in_the_shard_and_not_on_the_cut(isa: str) -> None:
    whole, parts = State(4096), [State(1024, first=0), State(3072, first=1024)]
    whole.next_gradient()
    parts[0].gradient[:], parts[1].gradient[:] = whole.gradient[:1024], whole.gradient[1024:]
    parts[0].master[:], parts[1].master[:] = whole.master[:1024], whole.master[1024:]
    for state in (whole, *parts):
        state.span.step(hyper(1))
    np.testing.assert_array_equal(whole.exp_avg, np.concatenate([part.exp_avg for part in parts]))
    other = State(4096, stream=SEED_STREAM + 1)
    other.gradient[:], other.master[:] = whole.gradient, parts[0].master.repeat(4)
    other.span.step(hyper(1))
    assert (other.exp_avg != whole.exp_avg).mean() > 0.3


def test_rounding_has_no_bias() -> None:
    """With round to nearest exp_avg_sq would stand still here: each step changes it by less than half a unit."""
    state = State(1 << 16)
    one = narrow(np.ones(1, np.float32))[0]
    state.exp_avg_sq[:], state.exp_avg[:], state.gradient[:] = one, one, 0
    state.span.step(hyper(1000))
    mean = widen(state.exp_avg_sq).astype(np.float64).mean()
    spread = 2.0**-8 / np.sqrt(state.master.size)  # standard error of the mean is below this
    assert abs(mean - 0.999) < 5 * spread
    assert abs(widen(state.exp_avg).astype(np.float64).mean() - 0.9) < 5 * spread
