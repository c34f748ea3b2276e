"""Finds the ranks whose value differs from that of most ranks that should have the same."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any


def odd_ranks(values: Mapping[int, Any]) -> list[tuple[int, int]]:
    """Returns (rank, one of the majority) for each minority rank; in a tie the lowest rank's value wins."""
    holders: dict[Any, list[int]] = {}
    for rank in sorted(values):
        holders.setdefault(_key(values[rank]), []).append(rank)
    most = max(holders.values(), key=lambda ranks: (len(ranks), -ranks[0]))
    return [(rank, most[0]) for ranks in holders.values() if ranks is not most for rank in ranks]


def bits_of(value: float) -> bytes:
    """Returns the bits of a float, so that NaN equals itself and the zeros differ."""
    return struct.pack("<d", value)


def _key(value: Any) -> Any:
    return bits_of(value) if isinstance(value, float) else value
