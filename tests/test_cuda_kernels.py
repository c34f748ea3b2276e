"""The accelerator's kernels, emulated, and what replaces them where they cannot be compiled: the processor's bits."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
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
from tests.kernel_battery import Case, norm_inputs, span_cases
from tests.kernel_tools import Guarded, assert_bits
from tests.reference.convert import narrow, widen

NAMES = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}
PACKS = (("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "fp32"), ("fp16", "fp32"))
UNPACKS = (("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "bf16"), ("fp32", "fp16"))
WORDS = {"fp32": np.float32, "bf16": np.uint16, "fp16": np.float16}


def sums_of(gradients: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.float64]:
    return np.concatenate([kernels.sum_of_squares(gradient) for gradient in gradients])


def kernel_of(operation: str, types: tuple[str, str]) -> str:
    return f"{operation}_{NAMES[types[0]]}_{NAMES[types[1]]}"


def widened(gradient: npt.NDArray[Any], form: str) -> npt.NDArray[np.float32]:
    """As the kernels do it: which NaN it is stays, where widen() makes a signalling one quiet."""
    if form != "fp16":
        return widen(gradient)
    values = widen(gradient).view(np.uint32).copy()
    words = gradient.view(np.uint16).astype(np.uint32)
    raw = ((words & 0x8000) << 16) | 0x7F800000 | ((words & 0x3FF) << 13)
    return np.where((words & 0x7C00) == 0x7C00, raw, values).view(np.float32)


def test_every_kernel_is_there_by_name() -> None:
    steps = [kernel_of("step", types) for types in UNPACKS]
    expected = [kernel_of("pack", types) for types in PACKS] + [kernel_of("unpack", types) for types in UNPACKS]
    assert sorted(emulation.kernel_names()) == sorted([*expected, *steps, *(f"{name}_noisy" for name in steps)])


@pytest.mark.parametrize("types", PACKS, ids=lambda types: "-".join(types))
def test_packed_bits_and_sums_are_those_of_the_native_kernel(types: tuple[str, str]) -> None:
    gradients = list(norm_inputs(types[0]))
    offsets = [int(n) for n in np.cumsum([0, *(gradient.size + i % 3 for i, gradient in enumerate(gradients))])]
    packed = np.zeros(offsets[-1], WORDS[types[1]])
    sums, nonfinite = emulation.pack(kernel_of("pack", types), gradients, offsets[:-1], packed)
    assert_bits("block sums", sums, sums_of(gradients))
    assert nonfinite
    for gradient, offset in zip(gradients, offsets, strict=False):
        native = np.empty_like(gradient)
        kernels.pack(gradient, native)
        expected = native if types[0] == types[1] else widened(native, types[0])
        assert_bits("packed gradient", packed[offset : offset + gradient.size], expected)


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


@pytest.mark.parametrize("types", UNPACKS, ids=lambda types: "-".join(types))
def test_unpack_gives_the_bits_of_the_reference(types: tuple[str, str]) -> None:
    staged = staged_values(types[0], 9000)
    for start, numel in ((0, 9000), (1024, 2048), (3, 1024), (5, 777), (0, 0)):
        source = staged[start : start + numel]
        target = Guarded(np.zeros(numel, WORDS[types[1]]), start % 4)
        pieces = geometry.copy_pieces([(target.array.ctypes.data, start, numel)])
        emulation.launch(kernel_of("unpack", types), pieces, staged.ctypes.data)
        expected = source if types[0] == types[1] else narrow(source, types[1])
        assert_bits("parameter", target.array, expected)
        assert target.intact()


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


@pytest.mark.parametrize("l2", [False, True], ids=["adamw", "l2"])
@pytest.mark.parametrize("types", UNPACKS, ids=lambda types: "-".join(types))
def test_step_gives_the_bits_of_the_reference(types: tuple[str, str], l2: bool) -> None:
    """All cases in one launch: every length, both kinds of values, all hyper-parameters."""
    spans = [case for case in span_cases(types[0], types[1], l2) if case.number % 3 == 0 or case.length >= 1000]
    memory = []
    rows: list[tuple[int | bytes, ...]] = []
    for case in spans:
        start = case.start if case.number % 2 else 0
        state = [Guarded(values.copy(), start) for values in case.old]
        gradient = Guarded(case.gradient, start)
        parameter = Guarded(np.zeros(case.length, WORDS[types[1]]), start)
        memory.append((*state, gradient, parameter))
        addresses = [guarded.array.ctypes.data for guarded in memory[-1]]
        rows.append((*addresses, case.length, 0, scalars_of(case)))
    emulation.launch(kernel_of("step", types), geometry.step_pieces(rows))
    for case, parts in zip(spans, memory, strict=True):
        for name, part, expected in zip(
            ("master", "exp_avg", "exp_avg_sq", "gradient", "parameter"),
            parts,
            (*case.stepped[:3], case.gradient, case.stepped.shadow),
            strict=True,
        ):
            assert_bits(name, part.array, expected, str(case))
            assert part.intact(), str(case)


@pytest.mark.parametrize("first_index", [0, 2**32 - 700])
def test_noisy_step_gives_the_bits_of_the_native_kernel(first_index: int) -> None:
    """bf16 moments: the noise depends on step, seed, shard and index only, so it is the same here."""
    numel, noise_stream = 3000, 12345 << 32 | 7
    old = cases.state("training", numel, 5)
    gradient = cases.gradient("training", "bf16", numel, 6)
    hyper = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "gradient_factor": 0.5}
    results = []
    for native in (True, False):
        master, parameter = old.master.copy(), np.zeros(numel, np.uint16)
        exp_avg, exp_avg_sq = narrow(old.exp_avg, "bf16"), narrow(old.exp_avg_sq, "bf16")
        arrays = [master, exp_avg, exp_avg_sq, gradient, parameter]
        addresses = [array.ctypes.data for array in arrays]
        if native:
            bf16 = _native.ElementType.bf16
            run = _native.Run(
                master=addresses[0],
                exp_avg=addresses[1],
                exp_avg_sq=addresses[2],
                gradient=addresses[3],
                shadow=addresses[4],
                numel=numel,
                gradient_type=bf16,
                shadow_type=bf16,
                state_type=bf16,
                first_index=first_index,
                noise_stream=noise_stream,
            )
            work = _native.BucketWork([run], 0)
            work.freeze(**hyper, l2=False, steps=[9])
            work.run_all(_native.Operation.step)
        else:
            scalars = _native.freeze_scalars(**hyper, l2=False, step=9, noise_stream=noise_stream)
            rows = [(*addresses, numel, first_index, scalars)]
            emulation.launch("step_bf16_bf16_noisy", geometry.step_pieces(rows))
        results.append((master, exp_avg, exp_avg_sq, parameter))
    for name, got, expected in zip(
        ("master", "exp_avg", "exp_avg_sq", "parameter"), results[1], results[0], strict=True
    ):
        assert_bits(name, got, expected)


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
