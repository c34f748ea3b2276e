"""bfloat16 moments with stochastic rounding: the reference's bits, exact undo, no bias."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from superoffload import kernels
from tests.support import numpy_kernels
from tests.support.reference import adam
from tests.support.reference.convert import narrow, widen
from tests.support.reference.fma import fma
from tests.support.reference.stochastic import RandomWords, noise

STREAM = (11 << 32) | 3


def hyper(step: int, factor: float = 1.0, *, l2: bool = False) -> numpy_kernels.Hyper:
    return numpy_kernels.Hyper(1e-3, 0.9, 0.999, 1e-8, 0.01, step, factor, l2)


class State:
    """A span with bf16 moments, and the gradients that drive it."""

    def __init__(self, numel: int) -> None:
        self.random = np.random.default_rng(5)
        self.master = self.random.standard_normal(numel).astype(np.float32)
        self.exp_avg, self.exp_avg_sq, self.gradient, self.shadow = (np.zeros(numel, np.uint16) for _ in range(4))
        arrays = (self.master, self.exp_avg, self.exp_avg_sq, self.gradient, self.shadow)
        self.span = numpy_kernels.Span(*arrays, noise_stream=STREAM)

    def draw(self, numel: int) -> NDArray[np.uint16]:
        return np.asarray(narrow(self.random.standard_normal(numel).astype(np.float32), "bf16"))

    def bits(self) -> list[bytes]:
        return [array.tobytes() for array in (self.master, self.exp_avg, self.exp_avg_sq)]

    def expected(self, h: numpy_kernels.Hyper) -> list[bytes]:
        random = noise(len(self.master), STREAM, h.step)
        stepped = adam.step(self.master, self.exp_avg, self.exp_avg_sq, self.gradient, "bf16", h, random)
        return [array.tobytes() for array in stepped]

    def step(self, h: numpy_kernels.Hyper) -> None:
        expected = self.expected(h)
        self.span.step(h)
        assert [*self.bits(), self.shadow.tobytes()] == expected


@pytest.fixture(params=kernels.available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with kernels.using_isa(str(request.param)):
        yield str(request.param)


def elements_that_show(
    right: NDArray[np.float32], wrong: NDArray[np.float32], random16: RandomWords
) -> NDArray[np.intp]:
    """For each pair of values an element whose noise rounds one of them up and the other down; -1: there is none."""
    element_with = np.full(1 << 16, -1, np.intp)
    element_with[random16] = np.arange(len(random16))
    larger = np.maximum(right.view(np.uint32), wrong.view(np.uint32)) & np.uint32(0xFFFF)
    differ = (right.view(np.uint32) != wrong.view(np.uint32)) & (larger != 0)
    return np.where(differ, element_with[(0x10000 - larger) & 0xFFFF], -1)


@pytest.mark.parametrize("moment", ["exp_avg", "exp_avg_sq"])
def test_the_last_bit_before_rounding_is_right(isa: str, moment: str) -> None:
    """Stochastic rounding hides it in nearly every element: values are put where the noise shows it. What rounding
    beta1 cuts off counts, and the gradient is squared first."""
    f, state = np.float32, State(1 << 16)
    m, g = state.draw(2000), state.draw(2000)
    random = noise(1 << 16, STREAM, 4)
    if moment == "exp_avg":
        rest = f(0.9 - float(f(0.9))) * widen(m)
        beta1, share = np.full_like(rest, f(0.9)), np.full_like(rest, f(1 - 0.9))
        right, wrong = (fma(beta1, widen(m), fma(share, widen(g), part)) for part in (rest, 0 * rest))
        at = elements_that_show(right, wrong, random & np.uint32(0xFFFF))
        state.exp_avg[at[at >= 0]] = m[at >= 0]
    else:
        share = f(1 - 0.999)
        right, wrong = share * (widen(g) * widen(g)), (share * widen(g)) * widen(g)
        at = elements_that_show(right, wrong, random >> np.uint32(16))
    assert (at >= 0).sum() > 100
    state.gradient[at[at >= 0]] = g[at >= 0]
    state.step(hyper(4))


@pytest.mark.parametrize(("width", "l2"), [(1, False), (2, True)])
def test_every_way_to_step_is_the_reference(isa: str, width: int, l2: bool) -> None:
    state = State(2500)
    for step in range(1, 25):
        state.gradient[:] = state.draw(2500)
        if step == 20:  # hostile values among the old state and the gradient
            state.gradient[:4] = [0x7FC0, 0x7F80, 0x8000, 0x0001]
            state.exp_avg[4:8] = [0x7FC0, 0xFF80, 0x8000, 0x7F7F]
            state.master[8:10] = [np.nan, -0.0]
        h, before = hyper(step, l2=l2), state.bits()
        *after, shadow = state.expected(h)
        replayed = state.expected(hyper(step, 0.25, l2=l2))
        assert state.span.step_journaled(h, width)
        assert state.bits() == after
        state.span.undo()
        assert state.bits() == before
        state.shadow[:] = 0
        state.span.publish(h)
        assert state.shadow.tobytes() == shadow
        assert state.span.step_journaled(h, width)
        state.span.replay(hyper(step, 0.25, l2=l2))
        assert [*state.bits(), state.shadow.tobytes()] == replayed


def test_rounding_has_no_bias() -> None:
    """With round to nearest exp_avg_sq would stand still here: each step changes it by less than half a unit."""
    state = State(1 << 16)
    state.exp_avg_sq[:] = state.exp_avg[:] = 0x3F80  # 1
    state.step(hyper(1000))
    spread = 2.0**-8 / np.sqrt(state.master.size)  # standard error of the mean is below this
    assert abs(widen(state.exp_avg_sq).astype(np.float64).mean() - 0.999) < 5 * spread
    assert abs(widen(state.exp_avg).astype(np.float64).mean() - 0.9) < 5 * spread
