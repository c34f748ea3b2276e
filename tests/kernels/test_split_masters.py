"""Split masters: two halves are a master's bits. (Every operation on them: test_kernels.py, test_bf16_moments.py.)"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import numpy.typing as npt

from tests.support import kernel_inputs as cases
from tests.support.reference import convert
from tests.support.reference.adam import Float32Array

# Upper halves where something ends: zero, denormals, one, the largest number, infinity, both kinds of NaN.
UPPER_EDGES = (0x0000, 0x0001, 0x007F, 0x0080, 0x3F7F, 0x3F80, 0x3F81, 0x7F7E, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF)
LOWER_EDGES = (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)  # 0x8000 is a tie
NAN = 0x7FC00000


def masters_with(uppers: npt.NDArray[np.uint32], lowers: npt.NDArray[np.uint32]) -> Float32Array:
    """Every pair of an upper and a lower half of a word."""
    words: Float32Array = ((uppers << np.uint32(16))[:, None] | lowers[None, :]).reshape(-1).view(np.float32)
    return words


def expect_bijection(uppers: npt.NDArray[np.uint16], lowers: npt.NDArray[np.uint16]) -> None:
    """From words to halves and back, and from halves to words and back; what is NaN becomes the one NaN."""
    master = masters_with(uppers.astype(np.uint32), lowers.astype(np.uint32))
    halves = convert.split(master)
    is_nan = np.isnan(master)
    expected = np.where(is_nan, np.uint32(NAN), master.view(np.uint32))
    assert np.array_equal(convert.join(*halves).view(np.uint32), expected)
    assert set(halves.upper[is_nan].tolist()) <= {0x7FC0} and not halves.remainder[is_nan].any()
    upper, remainder = np.repeat(uppers, lowers.size), np.tile(lowers.view(np.int16), uppers.size)
    joined = convert.join(upper, remainder)
    again = convert.split(joined)
    same = (again.upper == upper) & (again.remainder == remainder)
    assert (same | np.isnan(joined)).all()


def test_halves_and_words_determine_each_other() -> None:
    """Every lower half at both ends of binades, then every upper half near its tie."""
    every = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    for exponent in (*range(0, 512, 17), 254, 255, 256, 510, 511):  # and the sign
        expect_bijection(np.array([exponent << 7, exponent << 7 | 0x7F], np.uint16), every)
    expect_bijection(every, np.array(LOWER_EDGES, np.uint16))


def magnitude_of(pattern: int) -> Fraction:
    """A bf16 number without its sign; infinity as the number that would follow the largest one."""
    exponent, significand = pattern >> 7 & 0xFF, pattern & 0x7F
    return Fraction(significand + 128 * (exponent > 0)) * Fraction(2) ** (max(exponent, 1) - 134)


def test_the_upper_half_is_the_nearest_number_ties_away_from_zero() -> None:
    edges = [upper | sign for upper in UPPER_EDGES for sign in (0, 0x8000)]
    at_edges = masters_with(np.array(edges, np.uint32), np.array(LOWER_EDGES, np.uint32))
    values = np.concatenate([cases.hostile_fp32(4000, 600), at_edges])
    values = values[np.isfinite(values)]
    ties = 0
    for value, upper in zip(values, convert.split(values).upper, strict=True):
        below = int(np.abs(value).view(np.uint32)) >> 16
        magnitude = abs(Fraction(float(value)))
        over, under = magnitude_of(below + 1) - magnitude, magnitude - magnitude_of(below)
        ties += over == under
        expected = below + (over <= under) | (0x8000 if np.signbit(value) else 0)
        assert int(upper) == expected, f"{float(value).hex()}: {int(upper):#06x}, expected {expected:#06x}"
    assert ties > 100
