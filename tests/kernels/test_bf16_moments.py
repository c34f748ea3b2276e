"""bfloat16 moments with stochastic rounding: the reference's bits, exact undo, no bias, the same noise for parts."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from superoffload import kernels
from superoffload.distributed.ownership import Box
from tests.support import kernel_inputs as cases
from tests.support import numpy_kernels
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


# ---- the noise is that of an element's place in the whole parameter, whatever part a rank has ------------------------


class PlacedBox(NamedTuple):
    """A box of a parameter, how the kernels are told of it, and where its elements are, found by indexing."""

    shape: tuple[int, ...]
    box: Box
    order: tuple[int, ...] | None
    start: int
    axes: tuple[tuple[int, int], ...]
    places: NDArray[np.uint64]

    def __str__(self) -> str:
        return f"{self.box.lengths}-of-{self.shape}" + (f"-{self.order}" if self.order else "")


def placed(
    shape: tuple[int, ...], offsets: tuple[int, ...], lengths: tuple[int, ...], order: tuple[int, ...] | None = None
) -> PlacedBox:
    box = Box(offsets, lengths)
    whole = np.arange(np.prod(shape), dtype=np.uint64).reshape(shape)
    part = whole[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
    flat = (part if order is None else part.transpose(order)).ravel()
    return PlacedBox(shape, box, order, box.first_in(shape), box.axes_in(shape, order), flat)


# Columns; several dimensions; other orders in memory.
BOXES = (
    placed((700, 9), (0, 3), (700, 3)),
    placed((150, 64), (3, 16), (140, 17)),
    placed((5, 3000), (0, 1100), (5, 1000)),
    placed((6, 40, 33), (2, 5, 0), (4, 30, 33)),
    placed((8, 6, 9, 11), (0, 0, 0, 0), (8, 6, 9, 11), (0, 2, 3, 1)),
)


@each_isa
@pytest.mark.parametrize("box", BOXES, ids=str)
def test_a_part_has_the_bits_that_it_has_in_the_whole_parameter(isa: str, box: PlacedBox) -> None:
    numel = int(np.prod(box.shape))
    moments = np.zeros((2, numel), np.uint16)
    whole: list[Any] = [zeros(numel).master, *moments, *moments.copy()]  # and gradient and shadow
    part = [array[box.places].copy() for array in whole]
    span = numpy_kernels.Span(*whole, noise_stream=STREAM)
    here = numpy_kernels.Span(*part, noise_stream=STREAM, start=box.start, axes=box.axes)
    with kernels.using_isa(isa):
        for step, way in enumerate(("step", "journaled", "undone", "replayed", "two phases"), start=1):
            random, h = np.random.default_rng([step, numel]), hyper(step)
            values = random.standard_normal(numel) * 10.0 ** random.uniform(-2, 0, numel)
            whole[3][:] = narrow(values.astype(np.float32), "bf16")
            part[3][:] = whole[3][box.places]
            span.step(h)
            if way == "two phases":
                here.publish(h)
                here.settle(h)
            elif way != "step":
                assert here.step_journaled(hyper(step, 4.0 if way == "replayed" else 1.0), 1 + step % 2)
            if way == "undone":
                here.undo()
            if way in ("step", "undone"):
                here.step(h)
            if way == "replayed":
                here.replay(h)
            for name, all_of_it, found in zip(
                ("master", "exp_avg", "exp_avg_sq", "", "shadow"), whole, part, strict=True
            ):
                np.testing.assert_array_equal(found, all_of_it[box.places], f"{name}, {way}")
