"""Conversions between fp32, fp16 and bf16. An array's dtype names its format: NumPy has no bf16, so uint16 is bf16.

"split" is how a split master is published: bf16 as well, but with ties rounded away from zero.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]

FORMATS: dict[str, type[np.generic]] = {"fp32": np.float32, "bf16": np.uint16, "fp16": np.float16, "split": np.uint16}
CANONICAL_NAN: dict[str, int] = {"fp32": 0x7FC00000, "bf16": 0x7FC0, "fp16": 0x7E00}


class Halves(NamedTuple):
    """A split master."""

    upper: npt.NDArray[np.uint16]  # the published copy
    remainder: npt.NDArray[np.int16]


def format_of(array: npt.NDArray[Any]) -> str:
    """The name of the floating-point format that an array's dtype stands for."""
    for name, dtype in FORMATS.items():
        if array.dtype == dtype:
            return name
    raise ValueError(f"array dtype {array.dtype}: expected float32, float16 or uint16 (bf16)")


def bits(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same memory as unsigned integers, so that comparisons tell -0 from +0 and one NaN from another."""
    return array.view(f"u{array.dtype.itemsize}")


def canonical(values: Float32Array) -> Float32Array:
    """The values with every NaN replaced by the one pattern that is ever stored."""
    words = np.where(np.isnan(values), np.uint32(CANONICAL_NAN["fp32"]), values.view(np.uint32))
    replaced: Float32Array = words.astype(np.uint32).view(np.float32)
    return replaced


def widen(gradient: npt.NDArray[Any]) -> Float32Array:
    """A gradient of any format as fp32; exact."""
    name = format_of(gradient)
    if name == "bf16":
        wide: Float32Array = (gradient.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return wide
    with np.errstate(all="ignore"):
        return gradient.astype(np.float32)


def narrow(values: Float32Array, name: str) -> npt.NDArray[Any]:
    """fp32 rounded to nearest to the named format, ties to even except for "split"; overflow to infinity, denormals
    kept, NaN canonical.
    """
    if name == "fp32":
        return canonical(values)
    if name == "split":
        return split(values).upper
    if name == "bf16":
        rounded = _narrow_to_bf16(values)
    else:
        with np.errstate(all="ignore"):
            rounded = values.astype(np.float16).view(np.uint16)
    chosen = np.where(np.isnan(values), np.uint16(CANONICAL_NAN[name]), rounded).astype(np.uint16)
    return chosen.view(FORMATS[name])


def _narrow_to_bf16(values: Float32Array) -> npt.NDArray[np.uint16]:
    """The upper half of the word, one more if the lower half is beyond the tie, or on it and the upper half is odd."""
    words = values.view(np.uint32)
    upper = words >> np.uint32(16)
    lower = words & np.uint32(0xFFFF)
    up = (lower > 0x8000) | ((lower == 0x8000) & ((upper & np.uint32(1)) == 1))
    rounded: npt.NDArray[np.uint16] = (upper + up.astype(np.uint32)).astype(np.uint16)
    return rounded


def split(master: Float32Array) -> Halves:
    """With a master's bits as an unsigned number: (bits + 0x8000) >> 16, and what is missing from bits, signed."""
    words = canonical(master).view(np.uint32).astype(np.int64)
    upper = (words + 0x8000) >> 16
    return Halves(upper.astype(np.uint16), (words - (upper << 16)).astype(np.int16))


def join(upper: npt.NDArray[np.uint16], remainder: npt.NDArray[np.int16]) -> Float32Array:
    """The one master with these halves; also of halves that no master is split into: modulo 2**32."""
    words = (upper.astype(np.int64) << 16) + remainder
    master: Float32Array = (words % 2**32).astype(np.uint32).view(np.float32)
    return master
