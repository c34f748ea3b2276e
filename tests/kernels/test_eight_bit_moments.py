"""8-bit moments: the kernels against a reference of their own, exact undo, hostile blocks, no bias."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from superoffload import kernels
from tests.support import kernel_inputs as cases
from tests.support import numpy_kernels
from tests.support.guarded_arrays import GuardedSpan, assert_bits, assert_state
from tests.support.kernel_inputs import hostile_blocks
from tests.support.reference import eight_bit
from tests.support.reference.convert import narrow
from tests.support.reference.stochastic import noise

STREAM, FIRST = (11 << 32) | 3, 13
Float32Array = NDArray[np.float32]


@pytest.fixture(params=kernels.available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with kernels.using_isa(str(request.param)):
        yield str(request.param)


def hyper(step: int, factor: float = 1.0, *, eps: float = 1e-8, l2: bool = False) -> numpy_kernels.Hyper:
    return numpy_kernels.Hyper(1e-3, 0.9, 0.999, eps, 0.01, step, factor, l2)


class State:
    """A span with 8-bit moments, and its gradient. ``split``: its master is."""

    def __init__(self, numel: int, seed: int = 5, gradient: str = "bf16", *, split: bool = False) -> None:
        self.numel, self.format, self.published = numel, gradient, "split" if split else "bf16"
        self.random = np.random.default_rng(seed)
        start = self.random.standard_normal(numel).astype(np.float32)
        moment: Any = np.zeros(eight_bit.stored_size(numel), np.uint8)
        old, zeros = cases.State(start, moment, moment), narrow(np.zeros(numel, np.float32), gradient)
        self.guarded = GuardedSpan(old, zeros, self.published, seed % 3, noise_stream=STREAM, first_index=FIRST)
        self.span = self.guarded.span
        moments: Any = self.guarded.state[1:]
        self.exp_avg, self.exp_avg_sq = moments

    def set_gradient(self, values: Float32Array) -> None:
        self.gradient = narrow(values, self.format)
        self.guarded.set_gradient(self.gradient)

    def next_gradient(self, decades: float = 3.0) -> None:
        """Gradients that spread over several decades within a block."""
        size = 10.0 ** self.random.uniform(-decades, 0, self.numel)
        self.set_gradient((self.random.standard_normal(self.numel) * size).astype(np.float32))

    def check(self, way: str, h: numpy_kernels.Hyper) -> None:
        """Steps, and compares with the reference."""
        random = noise(self.numel, STREAM, h.step, FIRST)
        old = self._copies()
        wanted: Any = eight_bit.step(old.master, old.exp_avg, old.exp_avg_sq, self.gradient, self.published, h, random)
        self._do(way, h)
        for got, expected in zip((*self.guarded.state, self.guarded.shadow), wanted, strict=True):
            assert_bits(way, got, expected)
        self.guarded.check(way)

    def _copies(self) -> Any:
        return cases.State(*(array.copy() for array in self.guarded.state))

    def _do(self, way: str, h: numpy_kernels.Hyper) -> None:
        """Steps in one of the ways that must give the same bits; undoes on the way where that is one."""
        if way == "step":
            self.span.step(h)
        elif way == "two phases":
            self.span.publish(h)
            self.span.settle(h)
        else:
            width, before = 1 if way.endswith("1") else 2, self._copies()
            other = hyper(h.step, 3.0 * h.gradient_factor, eps=h.eps, l2=h.l2)
            assert self.span.step_journaled(other, width)
            if way.startswith("undo"):
                self.span.undo()
                assert_state(self.guarded.state, before, way)
                assert self.span.step_journaled(h, width)
            else:
                self.span.replay(h)


WAYS = ("step", "two phases", "undo 1", "undo 2", "replay 1", "replay 2")


def test_hostile_blocks(isa: str) -> None:
    blocks = list(hostile_blocks().values())
    for way in WAYS:
        state = State(256 * len(blocks), gradient="fp32")
        for step in range(1, 5):
            turned = blocks[step:] + blocks[:step]  # so that each block's contents meet another's state
            state.set_gradient(np.concatenate(turned if step % 2 else blocks))
            state.check(way, hyper(step, eps=0.0 if step == 3 else 1e-8))


edges = st.sampled_from([1, 64, 255, 256, 257, 1024, 1025, 3001])


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 2**32 - 1), numel=st.one_of(st.integers(1, 2100), edges), data=st.data())
def test_any_schedule_gives_the_bits_of_the_reference(seed: int, numel: int, data: st.DataObject) -> None:
    """Raw bit patterns as gradients and any bytes as state, in any order of ways to step."""
    with kernels.using_isa(data.draw(st.sampled_from(kernels.available_isas()))):
        gradient = data.draw(st.sampled_from(["fp32", "bf16", "fp16"]))
        state = State(numel, seed, gradient, split=data.draw(st.booleans()))
        if data.draw(st.booleans()):
            for moment in (state.exp_avg, state.exp_avg_sq):
                moment[:] = state.random.integers(0, 256, len(moment), np.uint8)
        for step in range(1, 5):
            if data.draw(st.booleans()):
                state.next_gradient()
            else:
                words = state.random.integers(0, 2**32, numel, np.uint32)
                state.set_gradient(words.view(np.float32))
            factor, eps = data.draw(st.sampled_from([1.0, 0.25, 0.0])), data.draw(st.sampled_from([1e-8, 0.0]))
            h = hyper(step, factor, eps=eps, l2=data.draw(st.booleans()))
            state.check(data.draw(st.sampled_from(WAYS)), h)


def test_journal_of_one_byte_is_enough_in_training(isa: str) -> None:
    state = State(1 << 16)
    size = 10.0 ** state.random.uniform(-3, 0, state.numel)
    for step in range(1, 41):
        state.set_gradient((state.random.standard_normal(state.numel) * size).astype(np.float32))
        assert state.span.step_journaled(hyper(step))
        if step > 10:
            first, second, master = state.span.escapes
            assert first < 0.02 * state.numel
            assert second < 0.01 * state.numel
            assert master < 0.01 * state.numel


def test_rounding_has_no_bias() -> None:
    """exp_avg_sq moves by a fraction of a code per step: its mean must follow fp32's all the same."""
    numel, steps = 1 << 15, 300
    state = State(numel, gradient="fp32")
    exact = np.zeros(numel)
    for step in range(1, steps + 1):
        g = state.random.standard_normal(numel).astype(np.float32)
        state.set_gradient(g)
        state.span.step(hyper(step))
        exact = 0.999 * exact + 0.001 * g.astype(np.float64) ** 2
    found = eight_bit.read(state.exp_avg_sq, numel, eight_bit.EXP_AVG_SQ)
    # The standard error of the mean is 0.35 / 256 of it, from the spread of the rounded values.
    assert abs(found.mean() / exact.mean() - 1) < 5 * found.std() / exact.mean() / np.sqrt(numel)


def test_denormal_codes_are_rounded_from_the_nearest_number(isa: str) -> None:
    """Numbers whose noise is one part of 2**20 too small for code 1, or just large enough, by the quarter above a part.

    With beta1 = 0 exp_avg is the gradient. Under the scale of 1.0 a part of a denormal code is 2**-37.
    """
    state = State(256, gradient="fp32")
    h = numpy_kernels.Hyper(1e-3, 0.0, 0.999, 1e-8, 0.01, 1)
    random16 = (noise(256, STREAM, 1, FIRST) & np.uint32(0xFFFF)).astype(np.int64)
    enough = (1 << 20) - 16 * random16 - 8
    gradient = ((enough - np.where(np.arange(256) % 2 == 0, 0.25, 0.75)) * 2.0**-37).astype(np.float32)
    gradient[0] = 1.0
    state.set_gradient(gradient)
    state.check("step", h)
    np.testing.assert_array_equal(state.exp_avg[1:256], np.arange(1, 256) % 2 == 0)


def test_what_the_bytes_mean() -> None:
    """A worked example of the format, by hand: scale 127 is the binade of 1."""
    one = np.array([0x78, 0x7F, 0x08, 0x01, 0xF8, 0x80, 0x00, 127], np.uint8)
    found = eight_bit.read(one, 7, eight_bit.EXP_AVG)
    np.testing.assert_array_equal(found, np.array([1.0, 1.875, 2.0**-14, 2.0**-17, -1.0, -0.0, 0.0], np.float32))
    one = np.array([0xF8, 0xFF, 0x08, 0x01, 0x00, 127], np.uint8)
    found = eight_bit.read(one, 5, eight_bit.EXP_AVG_SQ)
    np.testing.assert_array_equal(found, np.array([1.0, 1.875, 2.0**-30, 2.0**-33, 0.0], np.float32))
