"""Rational arithmetic, one element at a time: the slow truth that the array reference is proven against."""

from __future__ import annotations

import math
import struct
from fractions import Fraction
from typing import NamedTuple


class Format(NamedTuple):
    """A binary floating-point format: bits of significand (the hidden one counted) and of exponent."""

    precision: int
    exponent_bits: int

    @property
    def bias(self) -> int:
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def infinity(self) -> int:
        return ((1 << self.exponent_bits) - 1) << (self.precision - 1)


FP32 = Format(24, 8)
FP16 = Format(11, 5)
BF16 = Format(8, 8)


def float32_of(word: int) -> float:
    """The fp32 value of a 32-bit word, as a Python float."""
    return float(struct.unpack("<f", struct.pack("<I", word))[0])


def round_to(value: Fraction, form: Format, negative_zero: bool = False) -> int:
    """The bit pattern of the format's number nearest to a rational, ties to even, overflow to infinity.

    An exact zero has no sign of its own: `negative_zero` gives it one.
    """
    sign = 1 << (form.precision - 1 + form.exponent_bits)
    if value == 0:
        return sign if negative_zero else 0
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    exponent = max(exponent, 1 - form.bias)
    quantum = Fraction(2) ** (exponent - form.precision + 1)
    units = _nearest_integer(magnitude / quantum)
    # Below 2**(precision - 1) units the number is denormal; a carry out of the significand moves into the exponent,
    # and out of the last finite exponent into infinity: the encoding is made for just this sum.
    pattern = units + ((exponent + form.bias - 1) << (form.precision - 1))
    return min(pattern, form.infinity) | (sign if value < 0 else 0)


def _nearest_integer(value: Fraction) -> int:
    floor = value.numerator // value.denominator
    rest = value - floor
    if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and floor % 2 == 1):
        return floor + 1
    return floor


def fma32(x: float, y: float, z: float) -> int:
    """The fp32 word of x * y + z for fp32 inputs; every NaN is the canonical one."""
    if not (math.isfinite(x) and math.isfinite(y) and math.isfinite(z)):
        # With an infinity or a NaN nothing is rounded, and fp64 follows the same rules; where only z is infinite the
        # product of two fp32 numbers cannot overflow.
        return _word(x * y + z)
    total = Fraction(x) * Fraction(y) + Fraction(z)
    product_negative = math.copysign(1.0, x) * math.copysign(1.0, y) < 0
    z_negative = math.copysign(1.0, z) < 0
    return round_to(total, FP32, negative_zero=product_negative and z_negative)


def sqrt32(x: float) -> int:
    """The fp32 word of the square root of a finite, non-negative fp32 number."""
    if x == 0:
        return _word(x)
    value = Fraction(x)
    # 2**-120 steps are far finer than fp32's at any root (at least 2**-75), and a sticky bit keeps the root off a tie
    # that it is not on.
    scaled = value * Fraction(2) ** 240
    whole = scaled.numerator // scaled.denominator
    root = math.isqrt(whole)
    sticky = 0 if root * root == scaled else 1
    return round_to(Fraction(2 * root + sticky, 2) / Fraction(2) ** 120, FP32)


def div32(x: float, y: float) -> int:
    """The fp32 word of x / y for finite x and finite y other than zero."""
    negative = math.copysign(1.0, x) * math.copysign(1.0, y) < 0
    return round_to(Fraction(x) / Fraction(y), FP32, negative_zero=negative)


def mul32(x: float, y: float) -> int:
    """The fp32 word of x * y for finite x and y."""
    negative = math.copysign(1.0, x) * math.copysign(1.0, y) < 0
    return round_to(Fraction(x) * Fraction(y), FP32, negative_zero=negative)


def _word(value: float) -> int:
    """The word of a number that is fp32 already."""
    if math.isnan(value):
        return 0x7FC00000
    return int(struct.unpack("<I", struct.pack("<f", value))[0])
