"""Chooses what keys the noise of stochastic rounding: the seed, the parameter's name, and places in the parameter.

Nothing in it depends on how ranks share parameters, so that other meshes, stages and orders give the same noise.
"""

from __future__ import annotations

from hashlib import blake2b

from superoffload import _native
from superoffload.errors import ArgumentError

Axes = tuple[tuple[int, int], ...]


def noise_stream(seed: int, name: str) -> int:
    """Returns the 64 bits that stand for ``seed`` and for the parameter of the qualified name ``name``."""
    digest = blake2b(name.encode(), digest_size=8, key=seed.to_bytes(4, "little")).digest()
    return int.from_bytes(digest, "little")


def check_axes(name: str, axes: Axes) -> Axes:
    """Returns ``axes`` (``Shard.axes``); raises if there are more than the kernels know."""
    if len(axes) > _native.MAX_AXES:
        raise ArgumentError(
            f"{name}: its part on this rank is cut, or lies in memory, along {len(axes)} dimensions, expected at most "
            f"{_native.MAX_AXES} with rounded moments; pass state_dtype='fp32', or make the parameter contiguous"
        )
    return axes
