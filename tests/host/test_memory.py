"""Memory of large arrays: it starts where the caches like it, and has what was asked for."""

from __future__ import annotations

import pytest
import torch

from superoffload.host.memory import host_empty

PAGE, LINE = 4096, 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.uint8])
def test_large_arrays_start_at_different_lines_of_their_pages(dtype: torch.dtype) -> None:
    """A kernel walks seven arrays at once; here are twice as many, of the size at which their ends would coincide."""
    numel = (1 << 20) // dtype.itemsize
    arrays = [host_empty(numel, dtype) for _ in range(14)]
    assert len({array.data_ptr() % PAGE // LINE for array in arrays}) == 14
    assert all(array.data_ptr() % LINE == 0 for array in arrays)
    assert all(array.numel() == numel and array.dtype == dtype and array.is_contiguous() for array in arrays)
    for value, array in enumerate(arrays):
        array.fill_(value)
    assert all(bool((array == value).all()) for value, array in enumerate(arrays)), "they do not overlap"
