"""Host memory for state, gradients and shadows; whether it exceeds the processor's caches; a device without memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from superoffload import _native
from superoffload.errors import DeviceError, HostMemoryError
from superoffload.host.system import System, largest_cache_bytes

_NO_MEMORY = 2  # cudaErrorMemoryAllocation

BYTES_PER_PARAM = 18  # master, moments, packed gradient, shadow, journal: what a step touches, at least


def refused(nbytes: int, what: str) -> HostMemoryError:
    """The error that says so."""
    return HostMemoryError(
        f"host memory: {nbytes / 1e9:.3g} GB more were refused by the system, for {what}. superoffload plan adds up "
        "what a model needs, superoffload doctor what there is and what limits it; speculation='never' (no journal) "
        "and state_dtype='bf16' need less"
    )


def host_empty(numel: int, dtype: torch.dtype, what: str = "optimizer state or buckets") -> Tensor:
    """A flat tensor on the CPU with undefined values, on huge pages where the system has them. ``what`` it is for."""
    try:
        tensor = torch.empty(numel, dtype=dtype)
    except RuntimeError as error:
        raise refused(numel * dtype.itemsize, what) from error
    _native.prefer_huge_pages(tensor.data_ptr(), tensor.numel() * tensor.element_size())
    return tensor


def host_zeros(numel: int, dtype: torch.dtype, what: str = "optimizer state or buckets") -> Tensor:
    """Likewise, zero."""
    return host_empty(numel, dtype, what).zero_()


@cache
def _largest_cache_bytes() -> int:
    return largest_cache_bytes(System())


def exceeds_caches(numel: int) -> bool:
    """Whether a step over so many parameters touches more than the caches hold.

    Then what nobody reads soon (shadows, journal codes) is stored past them, which saves reading it first.
    """
    return numel * BYTES_PER_PARAM > _largest_cache_bytes()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch says that an accelerator has no memory left: its allocator, or the runtime in a later call."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    later = getattr(torch, "AcceleratorError", None)  # since torch 2.8
    if later is None or not isinstance(error, later):
        return False
    return getattr(error, "error_code", None) == _NO_MEMORY or "out of memory" in str(error).lower()


@contextmanager
def room_on_device(what: str, remedy: str = "Free memory there, or use smaller micro-batches") -> Iterator[None]:
    """An accelerator that has no memory left for what is done inside is a ``DeviceError``; nothing has changed then."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise DeviceError(f"{what}: there is no room on the device ({error}). {remedy}") from error
