"""The noise of stochastic rounding is that of an element's place in the whole parameter, whatever part a rank has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from superoffload import kernels
from tests.support import numpy_kernels
from tests.support.placed_boxes import BOXES, PlacedBox
from tests.support.reference import eight_bit
from tests.support.reference.convert import narrow
from tests.support.reference.stochastic import noise_at

STREAM = (11 << 32) | 3
WAYS = ("step", "journaled", "undone", "replayed", "two phases")


@pytest.fixture(params=kernels.available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with kernels.using_isa(str(request.param)):
        yield str(request.param)


def hyper(step: int, factor: float = 1.0) -> numpy_kernels.Hyper:
    return numpy_kernels.Hyper(1e-2, 0.9, 0.999, 1e-8, 0.01, step, factor)


def do(span: numpy_kernels.Span, way: str, step: int) -> None:
    if way == "step":
        span.step(hyper(step))
    elif way == "two phases":
        span.publish(hyper(step))
        span.settle(hyper(step))
    else:
        width = 1 + step % 2
        assert span.step_journaled(hyper(step, 4.0 if way == "replayed" else 1.0), width)
        if way == "undone":
            span.undo()
            span.step(hyper(step))
        if way == "replayed":
            span.replay(hyper(step))


def state_of(numel: int, moment: NDArray[np.uint16] | NDArray[np.uint8]) -> list[Any]:
    """master, exp_avg, exp_avg_sq, gradient, shadow."""
    master = np.random.default_rng(5).standard_normal(numel).astype(np.float32)
    return [master, moment.copy(), moment.copy(), np.zeros(numel, np.uint16), np.zeros(numel, np.uint16)]


def gradient(step: int, numel: int) -> NDArray[np.uint16]:
    random = np.random.default_rng([step, numel])
    return narrow((random.standard_normal(numel) * 10.0 ** random.uniform(-2, 0, numel)).astype(np.float32), "bf16")


def span_of(arrays: list[Any], **where: Any) -> numpy_kernels.Span:
    return numpy_kernels.Span(*arrays, noise_stream=STREAM, **where)


@pytest.mark.parametrize("box", BOXES, ids=str)
def test_a_part_has_the_bits_that_it_has_in_the_whole_parameter(isa: str, box: PlacedBox) -> None:
    """With bf16 moments, where elements do not depend on one another."""
    numel = int(np.prod(box.shape))
    whole = state_of(numel, np.zeros(numel, np.uint16))
    part = [array[box.places].copy() for array in whole]
    spans = span_of(whole), span_of(part, start=box.start, axes=box.axes)
    for step, way in enumerate(WAYS, start=1):
        whole[3][:] = gradient(step, numel)
        part[3][:] = whole[3][box.places]
        spans[0].step(hyper(step))
        do(spans[1], way, step)
        for name, all_of_it, here in zip(("master", "exp_avg", "exp_avg_sq", "", "shadow"), whole, part, strict=True):
            np.testing.assert_array_equal(here, all_of_it[box.places], f"{name}, {way}")


@pytest.mark.parametrize("box", BOXES, ids=str)
def test_8_bit_moments_take_the_noise_of_their_places(isa: str, box: PlacedBox) -> None:
    """Against the reference: the scales are those of the part's own blocks."""
    numel = len(box.places)
    part = state_of(numel, np.zeros(eight_bit.stored_size(numel), np.uint8))
    span = span_of(part, start=box.start, axes=box.axes)
    for step, way in enumerate(WAYS, start=1):
        part[3][:] = gradient(step, numel)
        random = noise_at(box.places, STREAM, step)
        wanted = eight_bit.step(part[0], part[1].copy(), part[2].copy(), part[3], "bf16", hyper(step), random)
        do(span, way, step)
        for here, expected in zip((*part[:3], part[4]), wanted, strict=True):
            np.testing.assert_array_equal(here, expected, way)


@pytest.mark.parametrize("box", BOXES[::2], ids=str)
def test_pieces_of_a_part_continue_its_places(isa: str, box: PlacedBox) -> None:
    """As buckets cut it, also past 2^32 places."""
    placed = {"start": (box.start + 2**32 - 3000) % 2**32, "axes": box.axes}
    for first_index in (1000, 1):
        whole = state_of(len(box.places), np.zeros(len(box.places), np.uint16))
        rest = [array[first_index:].copy() for array in whole]
        whole[3][:] = gradient(1, len(box.places))
        rest[3][:] = whole[3][first_index:]
        span_of(whole, **placed).step(hyper(1))
        span_of(rest, **placed, first_index=first_index).step(hyper(1))
        for all_of_it, here in zip(whole, rest, strict=True):
            np.testing.assert_array_equal(here, all_of_it[first_index:])
