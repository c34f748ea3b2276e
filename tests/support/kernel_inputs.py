"""Inputs for the kernel tests, made from an integer hash: the same bits on every machine and NumPy version.

Values come in two kinds. *training* looks like a model some steps into training: moments of the size that the
gradients imply, so that an undo journal's short codes fit. *hostile* mixes raw bit patterns, every special value,
denormals and significands that sit on or next to rounding ties, independently in every array.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tests.support.reference.adam import Float32Array, Float64Array, Hyper
from tests.support.reference.convert import narrow

KINDS = ("training", "hostile")
FORMATS = ("fp32", "bf16", "fp16")

# Around every vector width, every unrolling and the 1024-element block; the small ones completely.
LENGTHS: tuple[int, ...] = (
    *range(131),
    *(255, 256, 257, 511, 512, 513, 1000, 1023, 1024, 1025, 2047, 2048, 2049, 3000, 4095, 4096, 5000),
)
LONGEST = 5000
# Offsets in elements from a 64-byte boundary.
STARTS: tuple[int, ...] = (0, 1, 3, 5, 8, 15)

SPECIAL_FP32 = (
    *(0x00000000, 0x00000001, 0x00000002, 0x00000FFF, 0x00400000, 0x007FFFFF),  # zero and denormals
    *(0x00800000, 0x00800001, 0x01000000, 0x0C800000, 0x20000000),  # the smallest normal numbers and other tiny ones
    *(0x33000000, 0x337FFFFF, 0x33800000, 0x38800000, 0x387FC000, 0x387FE000),  # where fp16 becomes denormal, or zero
    *(0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x3F808000, 0x3F818000, 0x3F808001),  # one, and ties of bf16
    *(0x3F801000, 0x3F803000, 0x3F801001, 0x40490FDB, 0x3DCCCCCD),  # ties of fp16, and plain numbers
    *(0x477FE000, 0x477FEFFF, 0x477FF000, 0x47800000, 0x5F000000),  # where fp16 overflows
    *(0x7F000000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF),  # where bf16 overflows, and the largest number
    *(0x7F800000, 0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FC12345, 0x7FFFFFFF),  # infinity, signalling and quiet NaN
)
SPECIAL_BF16 = (0x0000, 0x0001, 0x007F, 0x0080, 0x0081, 0x3F7F, 0x3F80, 0x3F81, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF)
SPECIAL_FP16 = (0x0000, 0x0001, 0x03FF, 0x0400, 0x0401, 0x3BFF, 0x3C00, 0x3C01, 0x7BFF, 0x7C00, 0x7C01, 0x7E00, 0x7FFF)

# Every edge that the definition names, in turn with plain steps. lr * weight_decay = 0.1 * 10 makes the decay factor
# zero, but only if the product is rounded before it is subtracted from 1, as the definition says.
HYPERS = (
    Hyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=1e-2, step=1),
    Hyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=1e-2, step=2, gradient_factor=0.37),
    Hyper(lr=3e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=17),
    Hyper(lr=2e-5, beta1=0.95, beta2=0.98, eps=1e-6, weight_decay=0.0, step=4001, gradient_factor=1 / 65536),
    Hyper(lr=0.0, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=1e-2, step=9),
    Hyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=0.0, weight_decay=1e-2, step=5),
    Hyper(lr=0.5, beta1=0.0, beta2=0.999, eps=1e-8, weight_decay=1e-2, step=3),
    Hyper(lr=0.1, beta1=0.9, beta2=0.0, eps=1e-8, weight_decay=10.0, step=30),
    Hyper(lr=1e-3, beta1=1 - 2**-30, beta2=1 - 2**-50, eps=1e-8, weight_decay=1e-2, step=7),
    Hyper(lr=1e20, beta1=0.9, beta2=0.999, eps=1e-30, weight_decay=1e10, step=100, gradient_factor=1e18),
    Hyper(lr=1e-30, beta1=0.5, beta2=0.5, eps=1e30, weight_decay=1e-3, step=2, gradient_factor=1e-30),
    Hyper(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=1e-2, step=1, gradient_factor=0.0),
)


class State(NamedTuple):
    """The fp32 truth of some parameters before a step."""

    master: Float32Array
    exp_avg: Float32Array
    exp_avg_sq: Float32Array


def hash_words(count: int, seed: int) -> npt.NDArray[np.uint64]:
    """`count` well mixed 64-bit words: a counter through two rounds of multiply and xor-shift."""
    words: npt.NDArray[np.uint64] = np.arange(1, count + 1, dtype=np.uint64)
    words = words + np.uint64((seed * 0xD1342543DE82EF95 + 0x632BE59BD9B4E019) % 2**64)
    for multiplier in (0x9E3779B97F4A7C15, 0xF1357AEA2E62A9C5):
        words = words * np.uint64(multiplier)
        words = words ^ (words >> np.uint64(32))
    return words


def state(kind: str, count: int, seed: int) -> State:
    """Masters and moments of one kind."""
    if kind == "training":
        return State(
            ranged(count, seed, -9, -3), ranged(count, seed + 1, -14, -11), np.abs(ranged(count, seed + 2, -27, -23))
        )
    return State(hostile_fp32(count, seed), hostile_fp32(count, seed + 1), hostile_fp32(count, seed + 2))


def gradient(kind: str, form: str, count: int, seed: int) -> npt.NDArray[Any]:
    """Gradients of one kind in the named format."""
    if kind == "training":
        return narrow(ranged(count, seed, -14, -10), form)
    if form == "fp32":
        return hostile_fp32(count, seed)
    words = _hostile_16(count, seed, SPECIAL_BF16 if form == "bf16" else SPECIAL_FP16)
    return words if form == "bf16" else words.view(np.float16)


def finite(values: npt.NDArray[Any], form: str) -> npt.NDArray[Any]:
    """The values with every infinity and NaN brought into the finite range by clearing one exponent bit."""
    exponent, lowest = {"fp32": (0x7F800000, 0x00800000), "bf16": (0x7F80, 0x0080), "fp16": (0x7C00, 0x0400)}[form]
    word = np.uint32 if form == "fp32" else np.uint16
    words = values.view(word)
    cleared = words & word((1 << (8 * words.itemsize)) - 1 - lowest)
    return np.where((words & word(exponent)) == exponent, cleared, words).astype(word).view(values.dtype)


def block_sums(count: int, seed: int) -> Float64Array:
    """Non-negative fp64 numbers over a range wide enough that the order of additions shows."""
    words = hash_words(count, seed)
    exponent = np.uint64(1023 - 40) + (words >> np.uint64(58))
    sums: Float64Array = ((words & np.uint64(2**52 - 1)) | (exponent << np.uint64(52))).view(np.float64)
    return sums


def ranged(count: int, seed: int, low: int, high: int) -> Float32Array:
    """fp32 numbers of both signs with binary exponents from low to high and random significands."""
    words = hash_words(count, seed)
    exponent = ((words >> np.uint64(40)) % np.uint64(high - low + 1)).astype(np.uint32) + np.uint32(127 + low)
    return _assemble(words, exponent)


def hostile_fp32(count: int, seed: int) -> Float32Array:
    """fp32 patterns in which one lane in ten is special and the others differ in kind from lane to lane."""
    words = hash_words(count, seed)
    choice = (words >> np.uint64(56)) % np.uint64(10)
    raw = (words & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    special = np.array(SPECIAL_FP32, dtype=np.uint32)[(words >> np.uint64(33)) % np.uint64(len(SPECIAL_FP32))]
    middle = (raw & np.uint32(0x80FFFFFF)) | np.uint32(0x3B000000)
    # Significands of few bits, and just beside them: products and sums of these meet ties exactly.
    few = (middle & np.uint32(0xFFFF8000)) + ((words >> np.uint64(36)).astype(np.uint32) % np.uint32(3)) - np.uint32(1)
    signed_special = special | (raw & np.uint32(0x80000000))
    picked = np.select(
        [choice == 0, choice <= 2, choice <= 4, choice <= 6],
        [signed_special, raw & np.uint32(0x807FFFFF), raw, few],
        default=middle,
    )
    values: Float32Array = picked.astype(np.uint32).view(np.float32)
    return values


def _hostile_16(count: int, seed: int, specials: tuple[int, ...]) -> npt.NDArray[np.uint16]:
    words = hash_words(count, seed)
    raw = (words & np.uint64(0xFFFF)).astype(np.uint16)
    special = np.array(specials, dtype=np.uint16)[(words >> np.uint64(33)) % np.uint64(len(specials))]
    signed_special = special | (raw & np.uint16(0x8000))
    is_special = (words >> np.uint64(56)) % np.uint64(8) == 0
    picked: npt.NDArray[np.uint16] = np.where(is_special, signed_special, raw).astype(np.uint16)
    return picked


def _assemble(words: npt.NDArray[np.uint64], exponent: npt.NDArray[np.uint32]) -> Float32Array:
    raw = (words & np.uint64(0x807FFFFF)).astype(np.uint32)
    values: Float32Array = (raw | (exponent << np.uint32(23))).view(np.float32)
    return values


def hostile_blocks() -> dict[str, Float32Array]:
    """Gradients of one block each."""
    ones = np.ones(256, np.float32)
    signs = np.where(np.arange(256) % 2 == 0, 1, -1).astype(np.float32)
    tiny = np.full(256, 1e-40, np.float32)
    blocks = {
        "all zero": 0 * ones,
        "alternating signs": signs,
        "denormal": tiny * signs,
        "one huge value": ones * 1e-6,
        "huge, whose square overflows": ones * 1e-3,
        "largest number": ones,
        "infinity": ones.copy(),
        "minus infinity": ones.copy(),
        "nan": signs.copy(),
        "nothing but infinity": ones * np.inf,
        "infinities of both signs": signs * np.inf,
        "spread": (10.0 ** np.linspace(-30, 30, 256)).astype(np.float32) * signs,
    }
    blocks["one huge value"][77] = 1e12
    blocks["huge, whose square overflows"][5] = 1e30
    blocks["largest number"][0] = np.finfo(np.float32).max
    blocks["infinity"][255] = np.inf
    blocks["minus infinity"][0] = -np.inf
    blocks["nan"][100] = np.nan
    return blocks
