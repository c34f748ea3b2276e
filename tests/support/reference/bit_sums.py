"""Sums of bits as csrc/cuda/bit_sums.cuh defines them, in plain integers."""

from __future__ import annotations

from functools import cache

import numpy as np

_ALL = 2**64 - 1
BLOCK_BYTES = 2048


@cache
def number_of(place: int) -> int:
    """Odd, and like no other modulo 2^33."""
    mixed = (place + 1) * 0x9E3779B97F4A7C15 & _ALL
    mixed = (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 & _ALL
    return mixed | 1


def bit_sums(data: bytes) -> list[int]:
    """One for every 2048 bytes or part of them."""
    blocks = (data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES))
    return [_sum_of(block + bytes(-len(block) % 4)) for block in blocks]


def _sum_of(block: bytes) -> int:
    words: list[int] = np.frombuffer(block, "<u4").tolist()
    total: int = sum(word * number_of(place) for place, word in enumerate(words))
    return total & _ALL
