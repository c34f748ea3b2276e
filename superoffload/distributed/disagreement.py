"""Which ranks are in the minority."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any


def odd_ranks(values: Mapping[int, Any]) -> list[tuple[int, int]]:
    """(rank, one of the majority) for every rank whose value is not what most have; of equals, the lowest rank's."""
    holders: dict[Any, list[int]] = {}
    for rank in sorted(values):
        holders.setdefault(_key(values[rank]), []).append(rank)
    most = max(holders.values(), key=lambda ranks: (len(ranks), -ranks[0]))
    return [(rank, most[0]) for ranks in holders.values() if ranks is not most for rank in ranks]


def bits_of(value: float) -> bytes:
    """So that NaN equals itself and the zeros differ."""
    return struct.pack("<d", value)


def _key(value: Any) -> Any:
    return bits_of(value) if isinstance(value, float) else value
