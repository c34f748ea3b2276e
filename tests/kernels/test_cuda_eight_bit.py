"""8-bit moments on the accelerator, emulated: the reference's bits. (All lengths: tests/gpu/test_cuda_battery.py.)"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from superoffload import _native
from superoffload.links.cuda import geometry
from tests.support import emulated_kernels, numpy_kernels
from tests.support.emulated_kernels import STEPS, step_kernel
from tests.support.guarded_arrays import Guarded, assert_bits, halves_of, scalars_of
from tests.support.kernel_inputs import hostile_blocks
from tests.support.placed_boxes import BOXES
from tests.support.reference import eight_bit
from tests.support.reference.convert import FORMATS, join, narrow
from tests.support.reference.stochastic import noise_at

STREAM = 12345 << 32 | 7
# Around lanes, packets, warps' blocks of 256 and blocks of 1024.


def hyper(step: int, factor: float = 1.0) -> numpy_kernels.Hyper:
    return numpy_kernels.Hyper(1e-3, 0.9, 0.999, 0.0 if step == 3 else 1e-8, 0.01, step, factor, step == 2)


class Parameter:
    """Its memory, guarded. ``start``: elements behind an aligned address."""

    def __init__(self, numel: int, types: tuple[str, str], start: int = 0, first_index: int = 13) -> None:
        self.numel, self.types, self.first_index = numel, types, first_index
        self.axes: tuple[tuple[int, int], ...] = ()
        self.places = np.arange(numel, dtype=np.uint64) + np.uint64(first_index)
        self.random = np.random.default_rng([start, numel])
        master = self.random.standard_normal(numel).astype(np.float32)
        upper, remainder = halves_of(master)
        split, moment = types[1] == "split", np.zeros(eight_bit.stored_size(numel), np.uint8)
        gradient, parameter = narrow(np.zeros(numel, np.float32), types[0]), np.zeros(numel, FORMATS[types[1]])
        values = (remainder, upper) if split else (master, np.zeros(0, np.uint16))
        self.parts = [Guarded(value, start) for value in (*values, moment, moment.copy(), gradient, parameter)]
        self.stored, self.upper, self.exp_avg, self.exp_avg_sq, self.gradient, self.parameter = (
            part.array for part in self.parts
        )

    @property
    def master(self) -> NDArray[np.float32]:
        return join(self.upper, self.stored) if self.types[1] == "split" else self.stored.copy()

    def draw_gradient(self) -> None:
        """Values that spread over several decades within a block."""
        size = 10.0 ** self.random.uniform(-3, 0, self.numel)
        self.gradient[:] = narrow((self.random.standard_normal(self.numel) * size).astype(np.float32), self.types[0])

    def rows(self, h: numpy_kernels.Hyper, cuts: Sequence[int]) -> list[tuple[object, ...]]:
        """Pieces from cut to cut."""
        scalars = _native.freeze_scalars(**scalars_of(h), l2=h.l2, step=h.step, noise_stream=STREAM)
        found: list[tuple[object, ...]] = []
        for begin, end in pairwise([0, *cuts, self.numel]):
            addresses = [part.array.ctypes.data + begin * part.array.itemsize for part in self.parts]
            scales = [one.ctypes.data + self.numel + begin // 256 for one in (self.exp_avg, self.exp_avg_sq)]
            placed = geometry.placed(begin, self.first_index, self.axes)
            found.append((*addresses[:4], *scales, *addresses[4:], end - begin, *placed, scalars))
        return found


def step_all(
    params: Sequence[Parameter], h: numpy_kernels.Hyper, cuts: Sequence[int] = (), grid: int | None = None
) -> None:
    """One launch for all of them; each must be what the reference makes of it."""
    expected: list[Any] = []
    for one in params:
        noise, moments = noise_at(one.places, STREAM, h.step), (one.exp_avg.copy(), one.exp_avg_sq.copy())
        wanted = eight_bit.step(one.master, *moments, one.gradient, one.types[1], h, noise)
        expected.append((wanted, one.gradient.copy()))
    rows = [row for one in params for row in one.rows(h, cuts)]
    emulated_kernels.launch(f"{step_kernel(params[0].types)}_q8", geometry.step_pieces(rows), grid=grid)
    for one, (wanted, gradient) in zip(params, expected, strict=True):
        shown = f"{one.types}, {one.numel} elements"
        np.testing.assert_array_equal(one.exp_avg, wanted.exp_avg, shown)
        np.testing.assert_array_equal(one.exp_avg_sq, wanted.exp_avg_sq, shown)
        assert_bits("master", one.master, wanted.master, shown)
        assert_bits("parameter", one.parameter, wanted.shadow, shown)
        assert_bits("gradient", one.gradient, gradient, shown)
        assert one.types[1] != "split" or np.array_equal(one.upper, wanted.shadow), shown
        assert all(part.intact() for part in one.parts), shown


@pytest.mark.parametrize("types", STEPS, ids="-".join)
def test_hostile_blocks(types: tuple[str, str]) -> None:
    """Zeros, denormals, NaN, infinities, squares that overflow; each meets the state that each has left, or any
    bytes, as a checkpoint may bring them."""
    blocks = list(hostile_blocks().values())
    params = [Parameter(256 * len(blocks), types, start=turn % 2) for turn in range(len(blocks))]
    for moment in (params[0].exp_avg, params[0].exp_avg_sq):
        moment[:] = params[0].random.integers(0, 256, len(moment), np.uint8)
    for step in range(1, 5):
        for turn, param in enumerate(params):
            turned = blocks if step % 2 else blocks[turn:] + blocks[:turn]
            with np.errstate(over="ignore"):  # in fp16 more of them are infinite
                param.gradient[:] = narrow(np.concatenate(turned), types[0])
        step_all(params, hyper(step))
        nan = np.array([param.exp_avg[param.numel :] == eight_bit.NAN_SCALE for param in params])
        assert nan.any() and not nan.all()


def test_pieces_the_grid_and_places_in_the_whole_parameter() -> None:
    """As several buckets have them, and empty ones; blocks keep their scales, elements their noise."""
    for types, first_index in ((("bf16", "bf16"), 2**32 - 700), (("bf16", "split"), 0)):
        for cuts, grid in (((1024, 2048, 4096), None), ((2048, 2048), 1), ((0, 3072), 3)):
            param = Parameter(4400, types, first_index=first_index)
            for step in range(1, 3):
                param.draw_gradient()
                step_all([param], hyper(step), cuts, grid)
    for box in BOXES:
        param = Parameter(len(box.places), ("bf16", "bf16"), first_index=box.start)
        param.axes, param.places = box.axes, box.places
        param.draw_gradient()
        step_all([param], hyper(1), (1024,) if param.numel > 1024 else ())
