"""The accelerator's kernels, emulated, and what replaces them where they cannot be compiled.

What they compute is compared with the processor's bits in tests/gpu/test_cuda_battery.py, here and on a GPU.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from superoffload import _native, kernels
from superoffload.cuda import fallback, geometry
from tests import emulation
from tests import kernel_cases as cases
from tests.core_tools import to_numpy, to_tensor
from tests.device_battery import PACKS, STEPS, UNPACKS, WORDS, kernel_of, widened
from tests.kernel_battery import Case, norm_inputs, span_cases
from tests.kernel_tools import assert_bits
from tests.reference.convert import narrow


def test_every_kernel_is_there_by_name() -> None:
    """The battery (tests/device_battery.py) runs all that are."""
    steps = [kernel_of("step", types) for types in STEPS]
    expected = [kernel_of("pack", types) for types in PACKS] + [kernel_of("unpack", types) for types in UNPACKS]
    assert sorted(emulation.kernel_names()) == sorted([*expected, *steps, *(f"{name}_noisy" for name in steps)])


def test_finite_gradients_leave_the_flag_alone() -> None:
    gradients = [cases.gradient("training", "bf16", 5000, 7)]
    sums, nonfinite = emulation.pack("pack_bf16_bf16", gradients, [0], np.zeros(5000, np.uint16))
    assert not nonfinite
    assert np.isfinite(sums).all()


@pytest.mark.parametrize("grid", [1, 2, 100])
def test_the_grid_changes_nothing(grid: int) -> None:
    gradient = cases.finite(cases.gradient("hostile", "fp32", 30_000, 3), "fp32")
    pieces = geometry.copy_pieces([(gradient.ctypes.data, 0, gradient.size)])
    packed, sums, flag = np.zeros_like(gradient), np.zeros(30), np.zeros(1, np.uint32)
    emulation.launch("pack_f32_f32", pieces, packed.ctypes.data, sums.ctypes.data, flag.ctypes.data, grid=grid)
    assert_bits("packed gradient", packed, gradient)
    assert_bits("block sums", sums, kernels.sum_of_squares(gradient))


def staged_values(form: str, count: int) -> npt.NDArray[Any]:
    return cases.gradient("hostile", form, count, 17)


def scalars_of(case: Case) -> bytes:
    hyper = case.hyper
    return _native.freeze_scalars(
        lr=hyper.lr,
        beta1=hyper.beta1,
        beta2=hyper.beta2,
        eps=hyper.eps,
        weight_decay=hyper.weight_decay,
        gradient_factor=hyper.gradient_factor,
        l2=hyper.l2,
        step=hyper.step,
    )


# ---- torch's operations ----


@pytest.mark.parametrize("types", PACKS, ids=lambda types: "-".join(types))
def test_fallback_packs_with_the_same_bits(types: tuple[str, str]) -> None:
    for gradient in norm_inputs(types[0]):
        packed = torch.empty(gradient.size, dtype=to_tensor(np.zeros(1, WORDS[types[1]])).dtype)
        given = torch.empty(emulation.blocks_of(gradient), dtype=torch.float64)
        sums = fallback.pack(to_tensor(gradient), packed, given)
        assert sums is given
        assert_bits("block sums", sums.numpy(), kernels.sum_of_squares(gradient))
        expected = gradient if types[0] == types[1] else widened(gradient, types[0])
        assert_bits("packed gradient", to_numpy(packed), expected)


@pytest.mark.parametrize("types", UNPACKS, ids=lambda types: "-".join(types))
def test_fallback_unpacks_with_the_same_bits(types: tuple[str, str]) -> None:
    staged = staged_values(types[0], 5000)
    parameter = to_tensor(np.zeros(5000, WORDS[types[1]]))
    fallback.unpack(to_tensor(staged), parameter)
    assert_bits("parameter", to_numpy(parameter), staged if types[0] == types[1] else narrow(staged, types[1]))


def test_fallback_sums_nothing_and_infinity() -> None:
    empty = fallback.pack(torch.empty(0), torch.empty(0))
    assert empty.numel() == 0
    gradient = torch.ones(2000, dtype=torch.bfloat16)
    gradient[1500] = math.inf
    assert fallback.pack(gradient, torch.empty_like(gradient)).tolist() == [1024.0, math.inf]


# ---- geometry ----


def test_piece_tables_are_what_the_kernels_read() -> None:
    assert (geometry.COPY_PIECE.itemsize, geometry.STEP_PIECE.itemsize) == (32, 128)
    assert len(scalars_of(span_cases("fp32", "fp32", False)[0])) == geometry.SCALARS_BYTES
    table = geometry.copy_pieces([(64, 0, 1024), (128, 1024, 0), (192, 1024, 1), (256, 1088, 3000)])
    assert table["first_block"].tolist() == [0, 1, 1, 2]
    assert geometry.count_blocks(table) == 5


def test_grids() -> None:
    assert geometry.grid_for("pack_f32_f32", 17) == 3
    assert geometry.grid_for("unpack_f32_f32", 17) == 5
    assert geometry.grid_for("step_f32_f32_noisy", 17) == 17
    assert geometry.grid_for("step_f32_f32", 17, at_most=4) == 4
    assert geometry.grid_for("pack_f32_f32", 0) == 1


def test_who_builds_is_alone() -> None:
    """Files of tests that run side by side would compile into the same files."""
    entered = threading.Event()

    def enter() -> None:
        with emulation.only_one("test"):
            entered.set()

    thread = threading.Thread(target=enter)
    with emulation.only_one("test"):
        thread.start()
        assert not entered.wait(0.05)
    thread.join(60)
    assert entered.is_set()
