"""The accelerator's kernels, emulated: the processor's bits in any grid. (Types: tests/gpu/test_cuda_battery.py.)"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from superoffload import _native
from superoffload.links.cuda import geometry
from tests.support import emulated_kernels, numpy_kernels
from tests.support import kernel_inputs as cases
from tests.support.emulated_kernels import sum_pieces
from tests.support.guarded_arrays import Guarded, assert_bits, scalars_of
from tests.support.reference.bit_sums import BLOCK_BYTES, bit_sums, number_of
from tests.support.reference.convert import narrow

NO_SCALES = (0, 0)  # which only 8-bit moments have


# ---- sums of bits ----


def placed(nbytes: int, start: int, seed: int) -> Guarded:
    """Random bytes, ``start`` times 2 bytes behind an aligned address."""
    return Guarded(np.random.default_rng(seed).integers(0, 1 << 16, nbytes // 2, np.uint16), start)


def sums_by_kernel(memory: Sequence[Guarded], grid: int | None = None) -> list[npt.NDArray[np.uint64]]:
    sums = [np.full(len(bit_sums(one.array.tobytes())), 7, np.uint64) for one in memory]
    emulated_kernels.launch("sum_bits", pieces_of(memory, sums), grid=grid)
    return sums


def pieces_of(memory: Sequence[Guarded], sums: Sequence[npt.NDArray[np.uint64]]) -> geometry.Pieces:
    pairs = zip(memory, sums, strict=True)
    return sum_pieces((one.array.ctypes.data, there.ctypes.data, one.array.size) for one, there in pairs)


def test_two_elements_that_change_places_are_always_seen() -> None:
    """The difference of two elements has at most 31 factors of 2, also where they are halves of words, and that of two
    numbers at most 32: so their product is no multiple of 2^64. Of different halves the second is an odd number."""
    numbers = [number_of(place) for place in range(BLOCK_BYTES // 4)]
    assert all(number % 2 == 1 for number in numbers)
    assert len({number % 2**33 for number in numbers}) == len(numbers)
    elements = placed(BLOCK_BYTES, 0, 5)
    (before,) = sums_by_kernel([elements])
    for one, other in ((0, 1), (0, 2), (1, 1022), (511, 512), (1022, 1023)):
        elements.array[[one, other]] = elements.array[[other, one]]
        assert sums_by_kernel([elements])[0] != before
        elements.array[[one, other]] = elements.array[[other, one]]


@pytest.mark.parametrize(
    ("first_index", "start", "axes"), [(0, 0, ()), (50, 2**32 - 700, ((7, 20), (20, 1), (1000, 400)))]
)
def test_noisy_step_gives_the_bits_of_the_native_kernel(
    first_index: int, start: int, axes: tuple[tuple[int, int], ...]
) -> None:
    """bf16 moments: the noise depends on step, seed, parameter and place only, so it is the same here."""
    numel, stream, hyper = 3000, 12345 << 32 | 7, cases.HYPERS[2]
    old, gradient = cases.state("training", numel, 5), cases.gradient("training", "bf16", numel, 6)
    moments = [narrow(moment, "bf16") for moment in (old.exp_avg, old.exp_avg_sq)]
    native, here = (
        [old.master.copy(), *(m.copy() for m in moments), gradient, np.zeros(numel, np.uint16)] for _ in "12"
    )
    placed: dict[str, Any] = {"first_index": first_index, "start": start, "axes": axes}
    numpy_kernels.Span(*native, noise_stream=stream, **placed).step(hyper)
    scalars = _native.freeze_scalars(**scalars_of(hyper), l2=False, step=hyper.step, noise_stream=stream)
    master, exp_avg, exp_avg_sq, *rest = (array.ctypes.data for array in here)
    row = (master, 0, exp_avg, exp_avg_sq, *NO_SCALES, *rest, numel, *geometry.placed(**placed), scalars)
    emulated_kernels.launch("step_bf16_bf16_noisy", geometry.step_pieces([row]))
    for name, got, expected in zip(("master", "exp_avg", "exp_avg_sq", "", "parameter"), here, native, strict=True):
        assert_bits(name, got, expected)
