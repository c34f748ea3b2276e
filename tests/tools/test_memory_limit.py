"""The walks that measure the machine's limit: they touch what they say, and leave live state as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.memory_limit import Arrays, MemoryLimit, Way, all_ways, streams_of
from superoffload import _native

READ, WRITE, UPDATE = _native.Access.read, _native.Access.write, _native.Access.update
GUARD = 64  # bytes around an array that no code may touch


def filled(numel: int, itemsize: int, skew: int) -> tuple[np.ndarray, np.ndarray]:
    """Memory without a zero byte, and the part of it that is walked over, `skew` bytes off a cache line."""
    memory = np.full(numel * itemsize + 3 * GUARD, 0xA5, dtype=np.uint8)
    begin = GUARD + -memory.ctypes.data % GUARD + skew
    return memory, memory[begin : begin + numel * itemsize]


@pytest.mark.parametrize("skew", [0, 3])
@pytest.mark.parametrize("way", all_ways(), ids=lambda way: f"{way.loops}-{way.block}-{way.streaming_stores}")
def test_touches_what_it_says(way: Way, skew: int) -> None:
    for numel in (1, 63, 64, 65, 1000, 4099):
        for access in (READ, WRITE, UPDATE):
            memory, part = filled(numel, 2, skew)
            before = memory.copy()
            streams = [_native.Stream(part.ctypes.data, 2, access)]
            seconds = _native.walk_memory(streams, numel, way.block, way.loops, way.streaming_stores, [-1, -1], 1)
            assert seconds > 0
            if access is WRITE:
                assert not part.any(), "a write stores zeros, everywhere"
                part[:] = 0xA5
            assert np.array_equal(memory, before), "what was read or updated, and everything around, is as it was"


def test_reading_alone_is_what_publish_reads() -> None:
    four, two, one = (_Buffer(numel=4096, itemsize=itemsize) for itemsize in (4, 2, 1))
    arrays = Arrays(four, four, four, two, two, one)
    publish, publish_bytes = streams_of("publish", 1, arrays)
    reading, reading_bytes = streams_of("reading", 1, arrays)
    assert (publish_bytes, reading_bytes) == (16.0, 14.0)
    assert (len(publish), len(reading)) == (5, 4), "no shadow"
    limit = MemoryLimit("reading", 1, arrays, [-1])
    assert limit.way in all_ways() and limit.seconds() > 0


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"loops": "mmx"}, 'loops: "mmx", expected one of '),
        ({"block": 0}, "block: 0, expected at least 1 element"),
        ({"cpus": []}, "cpus: empty, expected one entry per thread"),
        ({"repeats": 0}, "repeats: 0, expected at least 1"),
    ],
)
def test_bad_arguments(bad: dict[str, Any], said: str) -> None:
    good: dict[str, Any] = {
        "block": 64,
        "loops": _native.memory_loops()[0],
        "streaming": False,
        "cpus": [-1],
        "repeats": 1,
    }
    _, part = filled(64, 4, 0)
    with pytest.raises(ValueError, match=said):
        _native.walk_memory([_native.Stream(part.ctypes.data, 4, UPDATE)], 64, *{**good, **bad}.values())
    assert (part == 0xA5).all()


class _Buffer:
    def __init__(self, numel: int, itemsize: int) -> None:
        self._bytes = np.zeros(numel * itemsize, dtype=np.uint8)
        self._numel, self._itemsize = numel, itemsize

    def data_ptr(self) -> int:
        return self._bytes.ctypes.data

    def element_size(self) -> int:
        return self._itemsize

    def numel(self) -> int:
        return self._numel
