"""The walks that measure memory's limit: they touch what they say, and leave live state as it was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.bandwidth.limit import Arrays, MemoryLimit, Way, all_ways, streams_of
from benchmarks.bandwidth.walks import Access, Stream, compile_to, walk_memory

GUARD = 64  # bytes around an array that no code may touch


@pytest.mark.parametrize("skew", [0, 3])
@pytest.mark.parametrize("way", all_ways(), ids=lambda way: f"{way.loops}-{way.block}-{way.streaming_stores}")
def test_walks_touch_what_they_say(way: Way, skew: int) -> None:
    for numel in (1, 63, 64, 65, 1000, 4099):
        for access in Access:
            memory = np.full(2 * numel + 3 * GUARD, 0xA5, dtype=np.uint8)
            begin = GUARD + -memory.ctypes.data % GUARD + skew
            part, before = memory[begin : begin + 2 * numel], memory.copy()
            streams = [Stream(part.ctypes.data, 2, access)]
            assert walk_memory(streams, numel, way.block, way.loops, way.streaming_stores, [-1, -1]) > 0
            if access is Access.write:
                assert not part.any(), "a write stores zeros, everywhere"
                part[:] = 0xA5
            assert np.array_equal(memory, before), "what was read or updated, and everything around, is as it was"


def test_a_limit_counts_the_bytes_of_its_operation() -> None:
    four, two, one = (torch.zeros(4096, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.uint8))
    arrays = Arrays(four, four, four, two, two, one)
    assert [streams_of(name, 1, arrays)[1] for name in ("step", "publish", "reading")] == [28.0, 16.0, 14.0]
    limit = MemoryLimit("step", 1, arrays, [-1])
    assert limit.way in all_ways() and limit.seconds() > 0


def test_the_sources_compile_without_a_warning(tmp_path: Path) -> None:
    compile_to(tmp_path / "walks.so", "-Werror")
    assert (tmp_path / "walks.so").stat().st_size > 1000
