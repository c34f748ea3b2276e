"""Allocates host memory for state, gradients and shadows; compares sizes with the caches; reports full devices."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import cycle

import torch
from torch import Tensor

from superoffload import _native
from superoffload.errors import DeviceError, HostMemoryError
from superoffload.host.system import System, largest_cache_bytes

_NO_MEMORY = 2  # cudaErrorMemoryAllocation

# A kernel walks about seven arrays at once. If their addresses end in the same 12 bits, as those of large allocations
# do, their lines compete for the same few places of the nearest cache, and loads wait for stores that they have
# nothing to do with: 1.3 to 1.7 x the time. So large arrays start at different cache lines of their pages.
_SPREAD_FROM = 1 << 20  # bytes
_PAGE, _LINE = 4096, 64
_starts = cycle(range(0, 16 * 13 * _LINE, 13 * _LINE))

BYTES_PER_PARAM = 18  # at least this much is touched by a step: master, moments, packed gradient, shadow, journal


def refused(nbytes: int, what: str) -> HostMemoryError:
    """Makes the error that reports refused host memory."""
    return HostMemoryError(
        f"host memory: {nbytes / 1e9:.3g} GB more were refused by the system, for {what}. superoffload plan adds up "
        "what a model needs, superoffload doctor what there is and what limits it; speculation='never' (no journal), "
        "state_dtype='bf16' or '8bit' and master_dtype='split' need less"
    )


def host_empty(numel: int, dtype: torch.dtype, what: str = "optimizer state or buckets") -> Tensor:
    """Makes a flat CPU tensor with undefined values, on huge pages if available. ``what`` is for the error."""
    large = numel * dtype.itemsize >= _SPREAD_FROM
    try:
        tensor = torch.empty(numel + (_PAGE // dtype.itemsize if large else 0), dtype=dtype, device="cpu")
    except RuntimeError as error:
        raise refused(numel * dtype.itemsize, what) from error
    if large:
        start = (next(_starts) - tensor.data_ptr()) % _PAGE // dtype.itemsize
        tensor = tensor[start : start + numel]
    _native.prefer_huge_pages(tensor.data_ptr(), tensor.numel() * tensor.element_size())
    return tensor


def host_zeros(numel: int, dtype: torch.dtype, what: str = "optimizer state or buckets") -> Tensor:
    """Makes a flat CPU tensor of zeros like ``host_empty``."""
    return host_empty(numel, dtype, what).zero_()


def give_free_memory_back() -> None:
    """Has the C library return freed memory to the system, of which it keeps pieces below 32 MiB for later.

    C libraries without malloc_trim (musl) return theirs by themselves.
    """
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@cache
def _largest_cache_bytes() -> int:
    return largest_cache_bytes(System())


def exceeds_caches(numel: int) -> bool:
    """Tells whether a step over so many parameters touches more memory than the caches hold.

    If so, the kernels store shadows and journal codes past the caches, which saves reading them first.
    """
    return numel * BYTES_PER_PARAM > _largest_cache_bytes()


def is_out_of_memory(error: BaseException) -> bool:
    """Tells whether torch reports an accelerator without memory: its allocator, or the runtime in a later call."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    later = getattr(torch, "AcceleratorError", None)  # since torch 2.8
    if later is None or not isinstance(error, later):
        return False
    return getattr(error, "error_code", None) == _NO_MEMORY or "out of memory" in str(error).lower()


@contextmanager
def room_on_device(what: str, remedy: str = "Free memory there, or use smaller micro-batches") -> Iterator[None]:
    """Turns an accelerator's lack of memory inside the context into a ``DeviceError``; nothing has changed then."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise DeviceError(f"{what}: there is no room on the device ({error}). {remedy}") from error
