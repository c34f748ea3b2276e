"""8-bit moments on the accelerator, emulated: the bits of the reference and of the processor's kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
from tests.support.placed_boxes import BOXES, PlacedBox
from tests.support.reference import eight_bit
from tests.support.reference.convert import FORMATS, join, narrow
from tests.support.reference.stochastic import noise_at

STREAM = 12345 << 32 | 7
# Around lanes, packets, warps' blocks of 256 and blocks of 1024.
LENGTHS = (0, 1, 3, 31, 33, 127, 255, 256, 257, 511, 512, 700, 1023, 1024, 1025, 1279, 1281, 2048, 3001)
Float32Array = NDArray[np.float32]

by_types = pytest.mark.parametrize("types", STEPS, ids="-".join)


def hyper(step: int, factor: float = 1.0, *, eps: float = 1e-8, l2: bool = False) -> numpy_kernels.Hyper:
    return numpy_kernels.Hyper(1e-3, 0.9, 0.999, eps, 0.01, step, factor, l2)


class Parameter:
    """Its state, gradient and published values in guarded memory. ``start``: elements behind an aligned address."""

    def __init__(
        self, numel: int, types: tuple[str, str], seed: int = 5, start: int = 0, first_index: int = 13
    ) -> None:
        self.numel, self.types, self.first_index = numel, types, first_index
        self.axes: tuple[tuple[int, int], ...] = ()
        self.places = np.arange(numel, dtype=np.uint64) + np.uint64(first_index)
        self.random = np.random.default_rng([seed, numel])
        master = self.random.standard_normal(numel).astype(np.float32)
        upper, remainder = halves_of(master)
        self.split = types[1] == "split"
        moment = np.zeros(eight_bit.stored_size(numel), np.uint8)
        values: dict[str, NDArray[Any]] = {
            "master": remainder if self.split else master,
            "upper": upper if self.split else np.zeros(0, np.uint16),
            "exp_avg": moment,
            "exp_avg_sq": moment,
            "gradient": narrow(np.zeros(numel, np.float32), types[0]),
            "parameter": np.zeros(numel, FORMATS[types[1]]),
        }
        self._parts = {name: Guarded(value, start) for name, value in values.items()}

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._parts[name].array

    @property
    def master(self) -> Float32Array:
        found: Float32Array = join(self["upper"], self["master"]) if self.split else self["master"].copy()
        return found

    def draw_gradient(self) -> None:
        """Values that spread over several decades within a block."""
        size = 10.0 ** self.random.uniform(-3, 0, self.numel)
        self.set_gradient((self.random.standard_normal(self.numel) * size).astype(np.float32))

    def set_gradient(self, values: Float32Array) -> None:
        self["gradient"][:] = narrow(values, self.types[0])

    def rows(self, h: numpy_kernels.Hyper, cuts: Iterable[int] = ()) -> list[tuple[object, ...]]:
        """Pieces from cut to cut."""
        scalars = _native.freeze_scalars(**scalars_of(h), l2=h.l2, step=h.step, noise_stream=STREAM)
        found: list[tuple[object, ...]] = []
        for begin, end in pairwise([0, *cuts, self.numel]):
            starts = {name: begin * self[name].itemsize for name in self._parts}
            scales = [self[name].ctypes.data + self.numel + begin // 256 for name in ("exp_avg", "exp_avg_sq")]
            addresses = [self[name].ctypes.data + start for name, start in starts.items()]
            placed = geometry.placed(begin, self.first_index, self.axes)
            found.append((*addresses[:4], *scales, *addresses[4:], end - begin, *placed, scalars))
        return found

    def expected(self, h: numpy_kernels.Hyper) -> eight_bit.Stepped:
        random = noise_at(self.places, STREAM, h.step)
        moments = self["exp_avg"].copy(), self["exp_avg_sq"].copy()
        return eight_bit.step(self.master, *moments, self["gradient"], self.types[1], h, random)

    def expect(self, wanted: eight_bit.Stepped, gradient: NDArray[Any]) -> None:
        shown = f"{self.types}, {self.numel} elements"
        for name, moment in (("exp_avg", wanted.exp_avg), ("exp_avg_sq", wanted.exp_avg_sq)):
            np.testing.assert_array_equal(self[name], moment, f"{name}; {shown}")
        assert_bits("master", self.master, wanted.master, shown)
        assert_bits("parameter", self["parameter"], wanted.shadow, shown)
        assert_bits("gradient", self["gradient"], gradient, shown)
        if self.split:
            assert_bits("upper", self["upper"], wanted.shadow, shown)
        assert all(part.intact() for part in self._parts.values()), shown


def step_all(
    params: Sequence[Parameter], h: numpy_kernels.Hyper, cuts: Iterable[int] = (), grid: int | None = None
) -> None:
    """One launch for all of them; each must be what the reference makes of it."""
    wanted = [(param.expected(h), param["gradient"].copy()) for param in params]
    rows = [row for param in params for row in param.rows(h, cuts)]
    emulated_kernels.launch(f"{step_kernel(params[0].types)}_q8", geometry.step_pieces(rows), grid=grid)
    for param, found in zip(params, wanted, strict=True):
        param.expect(*found)


@by_types
def test_steps_are_the_reference(types: tuple[str, str]) -> None:
    """Aligned and not; one step after another on what the one before has left."""
    params = [Parameter(numel, types, start=start) for numel in LENGTHS for start in (0, 1)]
    for step in range(1, 5):
        for param in params:
            param.draw_gradient()
        step_all(params, hyper(step, 0.37 if step == 2 else 1.0, eps=0.0 if step == 3 else 1e-8, l2=step == 4))


@by_types
def test_hostile_blocks(types: tuple[str, str]) -> None:
    """Zeros, denormals, NaN, infinities, squares that overflow; each meets the state that each has left."""
    blocks = list(hostile_blocks().values())
    params = [Parameter(256 * len(blocks), types, start=turn % 2) for turn in range(len(blocks))]
    for step in range(1, 5):
        for turn, param in enumerate(params):
            turned = blocks[turn:] + blocks[:turn]
            with np.errstate(over="ignore"):  # in fp16 more of them are infinite
                param.set_gradient(np.concatenate(blocks if step % 2 else turned))
        step_all(params, hyper(step, eps=0.0 if step == 3 else 1e-8, l2=step == 2))
        nan = np.array([param["exp_avg"][param.numel :] == eight_bit.NAN_SCALE for param in params])
        assert nan.any() and not nan.all()


@by_types
def test_any_bytes_are_state_and_any_bits_a_gradient(types: tuple[str, str]) -> None:
    params = [Parameter(numel, types, seed, start=seed % 2) for seed in range(6) for numel in (256, 700, 2100)]
    for param in params:  # as a checkpoint may bring them
        for name in ("exp_avg", "exp_avg_sq"):
            param[name][:] = param.random.integers(0, 256, len(param[name]), np.uint8)
    for step in range(1, 4):
        for param in params:
            words = param.random.integers(0, 256, param["gradient"].nbytes, np.uint8).view(param["gradient"].dtype)
            if param.numel == 700:  # finite: otherwise every block is soon NaN
                param.draw_gradient()
            else:
                param["gradient"][:] = words
        step_all(params, hyper(step, (1.0, 0.25, 0.0)[step % 3], l2=step == 2))


@pytest.mark.parametrize(("types", "first_index"), [(("bf16", "bf16"), 2**32 - 700), (("bf16", "split"), 0)])
def test_pieces_of_a_parameter_and_the_grid_change_nothing(types: tuple[str, str], first_index: int) -> None:
    """As several buckets have them, and empty ones; blocks keep their scales, elements their noise."""
    for cuts, grid in (((1024, 2048, 4096), None), ((2048, 2048), 1), ((0, 3072), 3)):
        param = Parameter(4400, types, first_index=first_index)
        for step in range(1, 4):
            param.draw_gradient()
            step_all([param], hyper(step), cuts, grid)


@pytest.mark.parametrize("box", BOXES, ids=str)
def test_noise_is_that_of_places_in_the_whole_parameter(box: PlacedBox) -> None:
    param = Parameter(len(box.places), ("bf16", "bf16"), first_index=box.start)
    param.axes, param.places = box.axes, box.places
    for step in range(1, 4):
        param.draw_gradient()
        step_all([param], hyper(step), (1024,) if step == 2 and param.numel > 1024 else ())
