"""Split masters: two halves are a master's bits, and every operation on them has the reference's bits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from superoffload import kernels
from superoffload._native import CHUNK
from tests.support import kernel_battery as battery
from tests.support import kernel_inputs as cases
from tests.support.guarded_arrays import GuardedSpan, assert_bits, assert_state, kernel_hyper
from tests.support.kernel_inputs import State
from tests.support.reference import adam, convert
from tests.support.reference.adam import Float32Array, Hyper, Stepped
from tests.support.reference.stochastic import noise

each_isa = pytest.mark.parametrize("isa", kernels.available_isas())
each_mode = pytest.mark.parametrize("mode", ["adamw", "l2"])
each_moments = pytest.mark.parametrize("moments", ["fp32", "bf16"])

STREAM = 12345 << 32 | 7
# Upper halves where something ends: zero, denormals, one, the largest number, infinity, both kinds of NaN.
UPPER_EDGES = (0x0000, 0x0001, 0x007F, 0x0080, 0x3F7F, 0x3F80, 0x3F81, 0x7F7E, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF)
LOWER_EDGES = (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)  # 0x8000 is a tie
LARGEST, INFINITY, NAN = 0x7F7FFFFF, 0x7F80, 0x7FC00000


def masters_with(uppers: npt.NDArray[np.uint32], lowers: npt.NDArray[np.uint32]) -> Float32Array:
    """Every pair of an upper and a lower half of a word."""
    words: Float32Array = ((uppers << np.uint32(16))[:, None] | lowers[None, :]).reshape(-1).view(np.float32)
    return words


def edge_masters() -> Float32Array:
    """Every edge of either half, both signs."""
    uppers = np.array([upper | sign for upper in UPPER_EDGES for sign in (0, 0x8000)], np.uint32)
    return masters_with(uppers, np.array(LOWER_EDGES, np.uint32))


# ---- the reference's own halves -------------------------------------------------------------------------------------


def expect_bijection(uppers: npt.NDArray[np.uint16], lowers: npt.NDArray[np.uint16]) -> None:
    """From words to halves and back, and from halves to words and back; what is NaN becomes the one NaN."""
    master = masters_with(uppers.astype(np.uint32), lowers.astype(np.uint32))
    halves = convert.split(master)
    is_nan = np.isnan(master)
    expected = np.where(is_nan, np.uint32(NAN), master.view(np.uint32))
    assert np.array_equal(convert.join(*halves).view(np.uint32), expected)
    assert set(halves.upper[is_nan].tolist()) <= {0x7FC0} and not halves.remainder[is_nan].any()
    upper, remainder = np.repeat(uppers, lowers.size), np.tile(lowers.view(np.int16), uppers.size)
    joined = convert.join(upper, remainder)
    again = convert.split(joined)
    same = (again.upper == upper) & (again.remainder == remainder)
    assert (same | np.isnan(joined)).all()


def test_halves_and_words_determine_each_other() -> None:
    """Every lower half at both ends of binades, then every upper half near its tie."""
    every = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    for exponent in (*range(0, 512, 17), 254, 255, 256, 510, 511):  # and the sign
        expect_bijection(np.array([exponent << 7, exponent << 7 | 0x7F], np.uint16), every)
    expect_bijection(every, np.array(LOWER_EDGES, np.uint16))


def magnitude_of(pattern: int) -> Fraction:
    """A bf16 number without its sign; infinity as the number that would follow the largest one."""
    exponent, significand = pattern >> 7 & 0xFF, pattern & 0x7F
    return Fraction(significand + 128 * (exponent > 0)) * Fraction(2) ** (max(exponent, 1) - 134)


def test_the_upper_half_is_the_nearest_number_ties_away_from_zero() -> None:
    values = np.concatenate([cases.hostile_fp32(4000, 600), edge_masters()])
    values = values[np.isfinite(values)]
    ties = 0
    for value, upper in zip(values, convert.split(values).upper, strict=True):
        below = int(np.abs(value).view(np.uint32)) >> 16
        magnitude = abs(Fraction(float(value)))
        over, under = magnitude_of(below + 1) - magnitude, magnitude - magnitude_of(below)
        ties += over == under
        expected = below + (over <= under) | (0x8000 if np.signbit(value) else 0)
        assert int(upper) == expected, f"{float(value).hex()}: {int(upper):#06x}, expected {expected:#06x}"
    assert ties > 100


def test_the_largest_number_publishes_as_infinity_and_stays_itself() -> None:
    largest = np.array([LARGEST], np.uint32).view(np.float32)
    halves = convert.split(largest)
    assert halves.upper[0] == INFINITY and halves.remainder[0] == -1
    assert convert.join(*halves)[0] == largest[0]


# ---- what the kernels store -----------------------------------------------------------------------------------------


@each_isa
def test_stored_halves_are_those_of_the_definition(isa: str) -> None:
    """lr = 0 and no decay store the masters themselves: every upper half near each tie."""
    hyper = kernel_hyper(Hyper(lr=0.0, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, step=2))
    every = np.arange(65536, dtype=np.uint32)
    zeros = np.zeros(65536, np.float32)
    with kernels.using_isa(isa):
        for lower in LOWER_EDGES:
            master = masters_with(every, np.array([lower], np.uint32))
            guarded = GuardedSpan(State(master, zeros, zeros), zeros, "split")
            guarded.span.step(hyper)
            halves = convert.split(master)
            assert_bits("upper halves", guarded.shadow, halves.upper, f"lower half {lower:#06x}")
            assert_bits("remainders", guarded.remainders, halves.remainder, f"lower half {lower:#06x}")


@dataclass(frozen=True)
class Trial:
    """Inputs of a span with split masters, and the reference's answers."""

    what: str
    old: State
    gradient: npt.NDArray[Any]
    hyper: Hyper
    again: Hyper  # what it is replayed with
    start: int
    first: int  # index of the first element
    moments: str

    @property
    def stepped(self) -> Stepped:
        return self._step(self.hyper)

    @property
    def replayed(self) -> Stepped:
        return self._step(self.again)

    def span(self, published: str = "split", arena_bytes: int | None = None) -> GuardedSpan:
        placed = {"noise_stream": STREAM, "first_index": self.first}
        return GuardedSpan(self.old, self.gradient, published, self.start, arena_bytes, **placed)

    def _step(self, hyper: Hyper) -> Stepped:
        return step_of(self.old, self.gradient, hyper, self.moments, self.first)


def step_of(old: State, gradient: npt.NDArray[Any], hyper: Hyper, moments: str, first: int = 0) -> Stepped:
    random = noise(gradient.size, STREAM, hyper.step, first) if moments == "bf16" else None
    return adam.step(*old, gradient, "split", hyper, random)


def with_moments(old: State, moments: str) -> State:
    return State(old.master, *(convert.narrow(values, moments) for values in old[1:]))


@cache
def trials(mode: str, moments: str) -> list[tuple[Trial, Stepped, Stepped]]:
    """Every length with both kinds of values, gradients' formats in turn; every hyper-parameter edge with every edge
    of a master. With each the step and the replay.
    """
    l2 = mode == "l2"
    made = []
    for number in range(2 * len(cases.LENGTHS)):
        case = battery.span_cases(cases.FORMATS[number % 3], "split", l2)[number]
        old, first = with_moments(case.old, moments), number % 2 * (2**32 - 20) + number
        made.append(Trial(f"{case}", old, case.gradient, case.hyper, case.clipped, case.start, first, moments))
    master = edge_masters()
    others = cases.state("hostile", master.size, 610)
    for number, plain in enumerate(cases.HYPERS):
        form = cases.FORMATS[number % 3]
        old = with_moments(State(master, *others[1:]), moments)
        gradient = cases.gradient("hostile", form, master.size, 620 + number)
        hyper, again = (replace(one, l2=l2) for one in (plain, cases.HYPERS[number - 1]))
        made.append(Trial(f"edges {hyper}", old, gradient, hyper, again, number, 0, moments))
    return [(trial, trial.stepped, trial.replayed) for trial in made]


def expect(guarded: GuardedSpan, expected: Stepped, context: str) -> None:
    assert_state(guarded.state, State(*expected[:3]), context)
    assert_bits("shadow", guarded.shadow, expected.shadow, context)
    guarded.check(context)


@each_isa
@each_mode
@each_moments
def test_every_way_to_step_is_the_reference(isa: str, mode: str, moments: str) -> None:
    """A publish changes neither remainders nor moments; an undo brings back the masters of both halves."""
    with kernels.using_isa(isa):
        for number, (trial, stepped, replayed) in enumerate(trials(mode, moments)):
            hyper, width = kernel_hyper(trial.hyper), 1 + number % 2
            guarded = trial.span()
            remainders = guarded.remainders.copy()
            assert guarded.span.step_journaled(hyper, width=width)
            expect(guarded, stepped, f"journaled step of {trial.what}")
            guarded.span.undo()
            assert_state(guarded.state, trial.old, f"undo of {trial.what}")
            assert_bits("remainders", guarded.remainders, remainders, f"undo of {trial.what}")
            guarded.span.publish(hyper)
            assert_bits("shadow", guarded.shadow, stepped.shadow, f"publish of {trial.what}")
            assert_bits("remainders", guarded.remainders, remainders, f"publish of {trial.what}")
            for name in ("exp_avg", "exp_avg_sq"):
                assert_bits(name, getattr(guarded.state, name), getattr(trial.old, name), f"publish of {trial.what}")
            guarded.span.settle(hyper)
            expect(guarded, stepped, f"settle of {trial.what}")
            guarded = trial.span()
            guarded.span.step(hyper)
            expect(guarded, stepped, f"step of {trial.what}")
            guarded = trial.span()
            assert guarded.span.step_journaled(hyper, width=width)
            guarded.span.replay(kernel_hyper(trial.again))
            expect(guarded, replayed, f"replay of {trial.what}")


@each_isa
@each_moments
def test_masters_have_the_bits_of_whole_ones_and_shadows_differ_at_ties(isa: str, moments: str) -> None:
    ties = 0
    with kernels.using_isa(isa):
        for trial, *_ in trials("adamw", moments):
            split, whole = trial.span(), trial.span("bf16")
            for guarded in (split, whole):
                guarded.span.step(kernel_hyper(trial.hyper))
            assert_state(split.state, whole.state, trial.what)
            words = whole.state.master.view(np.uint32)
            # To even, a tie goes to the even upper half: away from zero, to the other one.
            tie = (words & np.uint32(0x1FFFF)) == 0x8000
            assert np.array_equal(split.shadow != whole.shadow, tie), trial.what
            ties += int(tie.sum())
    assert ties > 20


@each_isa
def test_a_span_longer_than_a_worker_threads_chunk(isa: str) -> None:
    length, hyper = 2 * CHUNK + 1500, cases.HYPERS[2]
    old, gradient = cases.state("hostile", length, 640), cases.gradient("hostile", "bf16", length, 643)
    stepped, frozen = adam.step(*old, gradient, "split", hyper), kernel_hyper(hyper)
    with kernels.using_isa(isa):
        guarded = GuardedSpan(old, gradient, "split", start=3)
        assert guarded.span.step_journaled(frozen)
        guarded.span.undo()
        assert_state(guarded.state, old, "undo")
        guarded.span.publish(frozen)
        guarded.span.settle(frozen)
        expect(guarded, stepped, "publish and settle")
