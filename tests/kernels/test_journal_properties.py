"""Undo, replay, publish and settle under Hypothesis: any bits in state and gradient, any hyper-parameters that the
optimizer admits.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("hypothesis", reason="needs hypothesis: pip install hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st

from superoffload import kernels
from tests.support import kernel_inputs as cases
from tests.support.guarded_arrays import GuardedSpan, assert_bits, assert_state
from tests.support.kernel_inputs import State
from tests.support.reference import adam
from tests.support.reference.adam import Hyper
from tests.support.reference.convert import FORMATS

words32 = st.one_of(
    st.integers(0, 2**32 - 1),
    st.sampled_from([word | sign for word in cases.SPECIAL_FP32 for sign in (0, 2**31)]),
    # fp32 numbers near one another, for cancellation.
    st.integers(0x3F7FFFF0, 0x3F800010),
)
words16 = st.one_of(
    st.integers(0, 2**16 - 1),
    st.sampled_from([word | sign for word in cases.SPECIAL_BF16 + cases.SPECIAL_FP16 for sign in (0, 2**15)]),
)
betas = st.one_of(
    st.sampled_from([0.0, 0.9, 0.95, 0.999, 1 - 2.0**-53, 1 - 2.0**-24, 2.0**-60, 5e-324]),
    st.floats(0.0, 1.0, exclude_max=True),
)
magnitudes = st.one_of(st.sampled_from([0.0, 1e-8, 1e-3, 0.5, 1.0]), st.floats(0.0, 1e30))
factors = st.one_of(st.sampled_from([1.0, 0.5, 0.0, 2.0**-16, 2.0**-140]), st.floats(-1e30, 1e30))


@st.composite
def hypers(draw: st.DrawFn) -> Hyper:
    lr = draw(magnitudes)
    # A decay factor of exactly zero is its own case: nothing of the master is left.
    weight_decay = draw(st.one_of(magnitudes, st.just(1 / lr if lr > 1e-30 else 0.0)))
    step = draw(st.one_of(st.integers(1, 3), st.integers(1, 10**7)))
    return Hyper(lr, draw(betas), draw(betas), draw(magnitudes), weight_decay, step, draw(factors), draw(st.booleans()))


@st.composite
def inputs(draw: st.DrawFn) -> tuple[State, np.ndarray, str]:
    """A state and a gradient of unrelated bits, a few patterns repeated to a length that crosses vectors or blocks."""
    length = draw(st.one_of(st.integers(0, 70), st.sampled_from([1023, 1024, 1025, 1100])))
    form = draw(st.sampled_from(cases.FORMATS))

    def array(words: st.SearchStrategy[int], dtype: type) -> np.ndarray:
        patterns = draw(st.lists(words, min_size=1, max_size=23))
        return np.resize(np.array(patterns, dtype=dtype), length)

    state = State(*(array(words32, np.uint32).view(np.float32) for _ in range(3)))
    gradient = array(words32, np.uint32) if form == "fp32" else array(words16, np.uint16)
    return state, gradient.view(FORMATS[form]), draw(st.sampled_from((*cases.FORMATS, "split")))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(inputs(), hypers(), hypers(), st.integers(0, 15))
def test_two_phases_undo_and_replay_are_exact(
    given_inputs: tuple[State, np.ndarray, str], hyper: Hyper, other: Hyper, start: int
) -> None:
    old, gradient, published = given_inputs
    # A bucket's mode is its param group's and does not change between a step and its replay.
    other = replace(other, l2=hyper.l2)
    stepped = adam.step(*old, gradient, published, hyper)
    replayed = adam.step(*old, gradient, published, other)
    for isa in kernels.available_isas():
        for width in (1, 2):
            with kernels.using_isa(isa):
                context = f"{isa}, width {width}"
                guarded = GuardedSpan(old, gradient, published, start)
                guarded.span.publish(hyper)
                assert_bits("shadow", guarded.shadow, stepped.shadow, f"publish, {context}")
                if not guarded.split:
                    assert_state(guarded.state, old, f"publish, {context}")
                guarded.span.settle(hyper)
                guarded.expect(stepped, f"settle, {context}")
                guarded = GuardedSpan(old, gradient, published, start)
                assert guarded.span.step_journaled(hyper, width=width)
                guarded.expect(stepped, f"journaled step, {context}")
                guarded.span.undo()
                assert_state(guarded.state, old, f"undo, {context}")
                assert guarded.span.step_journaled(hyper, width=width)
                guarded.span.replay(other)
                guarded.expect(replayed, f"replay, {context}")
