"""The accelerator's kernels, emulated: the processor's bits."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from benchmarks.gpu_suite.launches import COPY_PIECE, SUM_PIECE, copy_pieces, grid_for, sum_pieces
from superoffload import _native, kernels
from superoffload.links.cuda import geometry
from tests.support import emulated_kernels
from tests.support import kernel_inputs as cases
from tests.support.emulated_kernels import NAMES, STEPS, step_kernel
from tests.support.guarded_arrays import Guarded, assert_bits, halves_of, scalars_of
from tests.support.kernel_battery import Case, norm_inputs, span_cases
from tests.support.reference.bit_sums import BLOCK_BYTES, bit_sums, number_of
from tests.support.reference.convert import FORMATS, join, narrow

NO_SCALES = (0, 0)  # which only 8-bit moments have
WORDS = {"fp32": np.float32, "bf16": np.uint16, "fp16": np.float16}


def sums_of(gradients: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.float64]:
    return np.concatenate([kernels.sum_of_squares(gradient) for gradient in gradients])


def test_every_kernel_is_there_by_name() -> None:
    steps = [step_kernel(types) for types in STEPS]
    copies = [*(f"pack_{name}" for name in NAMES.values()), "unpack_16", "unpack_32"]
    rounded = [f"{name}_{moments}" for name in steps for moments in ("noisy", "q8")]
    assert sorted(emulated_kernels.kernel_names()) == sorted([*copies, *steps, *rounded, "sum_bits", "compare_bits"])


@pytest.mark.parametrize("form", NAMES)
def test_packed_bits_and_sums_are_those_of_the_native_kernel(form: str) -> None:
    gradients = list(norm_inputs(form))
    offsets = [int(n) for n in np.cumsum([0, *(gradient.size + i % 3 for i, gradient in enumerate(gradients))])]
    packed = np.zeros(offsets[-1], WORDS[form])
    sums = emulated_kernels.pack(f"pack_{NAMES[form]}", gradients, offsets[:-1], packed)
    assert_bits("block sums", sums, sums_of(gradients))
    assert np.isinf(sums).any() and np.isfinite(sums).any()
    for gradient, offset in zip(gradients, offsets, strict=False):
        native = np.empty_like(gradient)
        kernels.pack(gradient, native)
        assert_bits("packed gradient", packed[offset : offset + gradient.size], native)


@pytest.mark.parametrize("grid", [1, 2, 100])
def test_the_grid_changes_nothing(grid: int) -> None:
    gradient = cases.finite(cases.gradient("hostile", "fp32", 30_000, 3), "fp32")
    pieces = copy_pieces([(gradient.ctypes.data, 0, gradient.size)])
    packed, sums = np.zeros_like(gradient), np.zeros(30)
    emulated_kernels.launch("pack_f32", pieces, packed.ctypes.data, sums.ctypes.data, 0, grid=grid)
    assert_bits("packed gradient", packed, gradient)
    assert_bits("block sums", sums, kernels.sum_of_squares(gradient))


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


@pytest.mark.parametrize("grid", [None, 1, 3])
def test_sums_of_bits_are_what_their_definition_says(grid: int | None) -> None:
    """Of every length around words, packets and blocks, wherever memory begins; many tensors in one launch."""
    lengths = (0, 2, 4, 6, 16, 2046, 2048, 2050, 4094, 4096, 4098, 6144, 10_006)
    memory = [placed(nbytes, start, nbytes) for nbytes in lengths for start in (0, 1, 2, 8)]
    found = sums_by_kernel(memory, grid)
    assert [one.tolist() for one in found] == [bit_sums(one.array.tobytes()) for one in memory]
    assert all(one.intact() for one in memory)


@pytest.mark.parametrize("grid", [None, 1])
def test_what_has_changed_is_found_and_nothing_else(grid: int | None) -> None:
    memory = [placed(nbytes, start, nbytes) for nbytes in (2, 2048, 5000, 0, 9000) for start in (0, 3)]
    sums = sums_by_kernel(memory)
    pieces = pieces_of(memory, sums)
    changed = np.zeros(len(memory), np.uint8)

    def compare() -> list[int]:
        changed[:] = 0
        emulated_kernels.launch("compare_bits", pieces, changed.ctypes.data, grid=grid)
        return [int(i) for i in np.flatnonzero(changed)]

    assert compare() == []
    for i, one in enumerate(memory):
        for place in {0, one.array.size // 3, one.array.size - 1} if one.array.size else ():
            one.array[place] ^= 1 << place % 16
            assert compare() == [i]
            one.array[place] ^= 1 << place % 16
    memory[2].array[7] ^= 1
    memory[9].array[-1] ^= 0x8000
    assert compare() == [2, 9]


@pytest.mark.parametrize("form", NAMES)
def test_the_pack_kernel_gives_the_same_sums_of_bits(form: str) -> None:
    gradients = list(norm_inputs(form))
    offsets = [int(n) for n in np.cumsum([0, *(gradient.size for gradient in gradients)])]
    packed = np.zeros(offsets[-1], WORDS[form])
    per_block = packed.itemsize // 2
    blocks = [per_block * emulated_kernels.blocks_of(gradient) for gradient in gradients]
    found = np.full(sum(blocks), 7, np.uint64)
    sums = emulated_kernels.pack(f"pack_{NAMES[form]}", gradients, offsets[:-1], packed, found)
    assert_bits("block sums", sums, sums_of(gradients))
    for gradient, end, count in zip(gradients, np.cumsum(blocks), blocks, strict=True):
        expected = bit_sums(gradient.tobytes())
        assert found[end - count : end].tolist()[: len(expected)] == expected


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


@pytest.mark.parametrize("form", ["fp32", "bf16"])
def test_signs_that_change_in_any_pattern_are_seen(form: str) -> None:
    """Numbers that only grow with the place would let + - - + through."""
    word: Any = np.uint32 if form == "fp32" else np.uint16
    sign = word(1 << 8 * np.dtype(word).itemsize - 1)
    for pattern in ((1, 0), (1, 0, 0, 1), (1, 1, 0, 0), (1, 0, 0, 1, 0, 1, 1, 0)):
        values = np.resize(np.array(pattern, word) * sign, BLOCK_BYTES // word().itemsize)
        (before,) = sums_by_kernel([Guarded(values.view(np.uint16), 0)])
        (now,) = sums_by_kernel([Guarded((values ^ sign).view(np.uint16), 0)])
        assert now != before, pattern


@pytest.mark.parametrize("form", ["fp32", "bf16"])
def test_unpack_keeps_every_bit(form: str) -> None:
    staged = cases.gradient("hostile", form, 9000, 17)
    for start, numel in ((0, 9000), (1024, 2048), (3, 1024), (5, 777), (0, 0)):
        target = Guarded(np.zeros(numel, WORDS[form]), start % 4)
        pieces = copy_pieces([(target.array.ctypes.data, start, numel)])
        emulated_kernels.launch(f"unpack_{8 * staged.itemsize}", pieces, staged.ctypes.data)
        assert_bits("parameter", target.array, staged[start : start + numel])
        assert target.intact()


def frozen(case: Case) -> bytes:
    return _native.freeze_scalars(**scalars_of(case.hyper), l2=case.hyper.l2, step=case.hyper.step)


@pytest.mark.parametrize("l2", [False, True], ids=["adamw", "l2"])
@pytest.mark.parametrize("types", STEPS, ids=lambda types: "-".join(types))
def test_step_gives_the_bits_of_the_reference(types: tuple[str, str], l2: bool) -> None:
    """All cases in one launch: every length, both kinds of values, all hyper-parameters."""
    spans = [case for case in span_cases(types[0], types[1], l2) if case.number % 3 == 0 or case.length >= 1000]
    memory = []
    rows: list[tuple[object, ...]] = []
    for case in spans:
        start = case.start if case.number % 2 else 0
        upper, master = halves_of(case.old.master) if types[1] == "split" else (np.zeros(0, np.uint16), case.old.master)
        state = [Guarded(values.copy(), start) for values in (master, upper, *case.old[1:])]
        gradient = Guarded(case.gradient, start)
        parameter = Guarded(np.zeros(case.length, FORMATS[types[1]]), start)
        memory.append((*state, gradient, parameter))
        addresses = [guarded.array.ctypes.data for guarded in memory[-1]]
        rows.append((*addresses[:4], *NO_SCALES, *addresses[4:], case.length, *geometry.placed(0, 0), frozen(case)))
    emulated_kernels.launch(step_kernel(types), geometry.step_pieces(rows))
    for case, parts in zip(spans, memory, strict=True):
        stored, halves, *rest = (part.array for part in parts)
        found = [join(halves, stored) if types[1] == "split" else stored, *rest]
        for name, got, expected in zip(
            ("master", "exp_avg", "exp_avg_sq", "gradient", "parameter"),
            found,
            (*case.stepped[:3], case.gradient, case.stepped.shadow),
            strict=True,
        ):
            assert_bits(name, got, expected, str(case))
        assert all(part.intact() for part in parts), str(case)


@pytest.mark.parametrize("axes", [(), ((100, 1), (50, 300)), ((7, 20), (20, 1), (1000, 400)), ((1 << 40, 5),)], ids=str)
@pytest.mark.parametrize(("first_index", "start"), [(0, 0), (50, 2**32 - 700)])
def test_noisy_step_gives_the_bits_of_the_native_kernel(
    first_index: int, start: int, axes: tuple[tuple[int, int], ...]
) -> None:
    """bf16 moments: the noise depends on step, seed, parameter and place only, so it is the same here."""
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
                start=start,
                axes=axes,
                noise_stream=noise_stream,
            )
            work = _native.BucketWork([run], 0)
            work.freeze(**hyper, l2=False, steps=[9])
            work.run_all(_native.Operation.step)
        else:
            scalars = _native.freeze_scalars(**hyper, l2=False, step=9, noise_stream=noise_stream)
            rows = [
                (
                    addresses[0],
                    0,
                    *addresses[1:3],
                    *NO_SCALES,
                    *addresses[3:],
                    numel,
                    *geometry.placed(first_index, start, axes),
                    scalars,
                )
            ]
            emulated_kernels.launch("step_bf16_bf16_noisy", geometry.step_pieces(rows))
        results.append((master, exp_avg, exp_avg_sq, parameter))
    for name, got, expected in zip(
        ("master", "exp_avg", "exp_avg_sq", "parameter"), results[1], results[0], strict=True
    ):
        assert_bits(name, got, expected)


# ---- geometry ----


def test_piece_tables_are_what_the_kernels_read() -> None:
    assert (COPY_PIECE.itemsize, SUM_PIECE.itemsize, geometry.STEP_PIECE.itemsize) == (32, 32, 232)
    assert len(frozen(span_cases("fp32", "fp32", False)[0])) == geometry.SCALARS_BYTES
    table = copy_pieces([(64, 0, 1024), (128, 1024, 0), (192, 1024, 1), (256, 1088, 3000)])
    assert table["first_block"].tolist() == [0, 1, 1, 2]
    assert geometry.count_blocks(table) == 5


def test_grids() -> None:
    assert grid_for("pack_f32", 17) == 3
    assert grid_for("unpack_32", 17) == grid_for("sum_bits", 17) == 5
    assert grid_for("step_f32_f32_noisy", 17) == 17
    assert grid_for("pack_f32", 0) == 1


def test_who_builds_is_alone() -> None:
    """Files of tests that run side by side would compile into the same files."""
    entered = threading.Event()

    def enter() -> None:
        with emulated_kernels.only_one("test"):
            entered.set()

    thread = threading.Thread(target=enter)
    with emulated_kernels.only_one("test"):
        thread.start()
        assert not entered.wait(0.05)
    thread.join(60)
    assert entered.is_set()
