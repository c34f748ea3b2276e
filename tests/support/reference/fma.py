"""A correctly rounded fp32 fused multiply-add, on arrays, in terms of fp64 arithmetic that every NumPy has."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]
Float32Like = Float32Array | np.float32


def fma(x: Float32Like, y: Float32Like, z: Float32Like) -> Float32Array:
    """Round x * y + z once, to nearest even, to fp32; denormals, signed zeros, infinities and NaN as IEEE 754 says.

    Why it is exact: two 24-bit significands multiply into 48 bits, so the fp64 product is exact (its exponent is at
    least -298, far from fp64's own denormals). The fp64 sum is not exact, and rounding it again to fp32 could round
    twice. So the sum is rounded *to odd* first: whatever was cut off survives in the last bit, and since fp64 has
    more than two bits beyond fp32, the second rounding sees on which side of a tie the true value lies.
    """
    with np.errstate(all="ignore"):
        product = np.multiply(x, y, dtype=np.float64)
        addend = np.asarray(z, dtype=np.float64)
        total = product + addend
        # Knuth's TwoSum: total + error is the exact sum, whichever operand is larger.
        addend_part = total - product
        error = (product - (total - addend_part)) + (addend - addend_part)
        return np.asarray(_round_to_odd(total, error), dtype=np.float64).astype(np.float32)


def _round_to_odd(total: npt.NDArray[np.float64], error: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Of the two doubles around total + error, the one with an odd significand; total itself where it is exact.

    `total` is one of the two already. If it is odd it is the answer; if it is even the answer is its neighbour on the
    side of the error. Where total is not finite the error is NaN or meaningless and total stands.
    """
    total = np.atleast_1d(total)
    error = np.atleast_1d(error)
    even = (total.view(np.uint64) & np.uint64(1)) == 0
    inexact = np.isfinite(total) & (error != 0)
    neighbour = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where(inexact & even, neighbour, total)
