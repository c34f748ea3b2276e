"""The noise of stochastic rounding is that of an element's place in the whole parameter, whatever part a rank has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from superoffload import kernels
from superoffload.distributed.ownership import Box
from tests.support import numpy_kernels
from tests.support.reference.convert import narrow


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
