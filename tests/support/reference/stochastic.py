"""Stochastic rounding of bf16 moments: the random bits of each element, and how they round."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tests.support.reference.convert import Float32Array, canonical

RandomWords = npt.NDArray[np.uint32]


def mix(x: int) -> int:
    """splitmix64's output function."""
    mask = 2**64 - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def noise(numel: int, stream: int, step: int, first: int = 0) -> RandomWords:
    """32 random bits for each element from place `first` on; `stream` stands for seed and parameter."""
    return noise_at(np.arange(numel, dtype=np.uint64) + np.uint64(first), stream, step)


def noise_at(places: npt.NDArray[np.uint64], stream: int, step: int) -> RandomWords:
    """32 random bits for each element, whose place is its index in the whole parameter."""
    key = np.uint32(mix(stream ^ mix(step)) & 0xFFFFFFFF)
    with np.errstate(over="ignore"):
        x = places.astype(np.uint32) ^ key
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
        x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return np.asarray(x ^ (x >> np.uint32(16)), np.uint32)


def stochastic(values: Float32Array, random16: RandomWords) -> Float32Array:
    """fp32 numbers that bf16 has: 16 random bits are added to the lower half, and it is cut off."""
    words = canonical(values).view(np.uint32) + random16
    return np.asarray(words & np.uint32(0xFFFF0000), np.uint32).view(np.float32)


def upper_halves(values: Float32Array) -> npt.NDArray[np.uint16]:
    """Numbers that bf16 has, as bf16."""
    return np.asarray(values.view(np.uint32) >> np.uint32(16), np.uint16)
