"""A parameter of more than 2^31 elements: no count, offset or index on its way is a number of 32 bits.

Most of its 43 GB is one piece of memory that is mapped over and over and stays zero. The elements behind it have memory
of their own, and must get the bits that an optimizer of nothing else gives them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import superoffload
from superoffload.engine.bucket import BLOCK
from superoffload.host.bits import same_bits
from superoffload.host.memory import host_empty

SHARED = 1 << 31  # elements
OWN = 3 * BLOCK + 7
NUMEL = SHARED + OWN
PERIOD = 8 << 20  # bytes
MAP_FIXED, MAP_NORESERVE, MAP_POPULATE = 0x10, 0x4000, 0x8000


class RepeatedMemory:
    """Flat tensors of zeros whose first SHARED elements have PERIOD bytes of memory in all."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._mapped: list[tuple[int, int]] = []

    def _map(self, address: int | None, length: int, flags: int, file: int = -1) -> int:
        got = self._libc.mmap(address, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, file, 0)
        assert got != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
        return int(got)

    def zeros(self, numel: int, dtype: torch.dtype, *_: str) -> Tensor:
        if numel < SHARED:
            return host_empty(numel, dtype).zero_()
        length = numel * dtype.itemsize
        start = self._map(None, length, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        self._mapped.append((start, length))
        file = os.memfd_create("period")
        os.ftruncate(file, PERIOD)
        for offset in range(0, SHARED * dtype.itemsize, PERIOD):
            self._map(start + offset, PERIOD, mmap.MAP_SHARED | MAP_FIXED | MAP_POPULATE, file)
        os.close(file)
        return torch.frombuffer((ctypes.c_char * length).from_address(start), dtype=dtype)

    def close(self) -> None:
        for start, length in self._mapped:
            self._libc.munmap(start, length)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[RepeatedMemory]:
    repeated = RepeatedMemory()
    monkeypatch.setattr("superoffload.links.host.host_empty", repeated.zeros)
    monkeypatch.setattr("superoffload.engine.placement.host_empty", repeated.zeros)
    monkeypatch.setattr("superoffload.engine.placement.host_zeros", repeated.zeros)
    yield repeated
    repeated.close()


class GivesGradient(torch.autograd.Function):
    """A scalar whose gradient is what is put into ``gradients``: as it is, without a copy of 4 GB."""

    gradients: list[Tensor]

    @staticmethod
    def forward(ctx: Any, param: Tensor) -> Tensor:
        return torch.zeros((), requires_grad=True)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> Tensor:
        return GivesGradient.gradients.pop()


def backward(param: Tensor, own: Tensor, memory: RepeatedMemory) -> None:
    gradient = memory.zeros(param.numel(), torch.bfloat16)
    gradient[-OWN:] = own
    GivesGradient.gradients = [gradient]
    del gradient
    GivesGradient.apply(param).backward()


def free_bytes() -> int:
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) << 10


@pytest.mark.in_turn("huge parameter")
@pytest.mark.skipif(free_bytes() < 8 << 30, reason="needs 8 GiB of free memory, 5 of them for the journal")
def test_elements_beyond_the_first_two_billion_are_stepped_like_any_others(memory: RepeatedMemory) -> None:
    """Speculated, undone by a second backward, speculated again, committed; one bucket of more than 2^31 elements."""
    values = torch.linspace(-1, 1, OWN).bfloat16()
    gradients = [torch.linspace(-2e-3, 1e-3, OWN).bfloat16(), torch.linspace(3e-3, 1e-3, OWN).bfloat16()]
    trained = []
    for numel, bucket_numel in ((OWN, None), (NUMEL, SHARED + BLOCK)):
        param = torch.nn.Parameter(memory.zeros(numel, torch.bfloat16))
        param.data[-OWN:] = values
        optimizer = superoffload.AdamW(
            [param], lr=0.1, max_grad_norm=1.0, speculation="always", bucket_numel=bucket_numel
        )
        for own in gradients:
            backward(param, own, memory)
        optimizer.step()
        trained.append((param, optimizer))
    (small, one), (huge, other) = trained
    assert other.stats()["buckets_undone"] == other.stats()["buckets_committed"] == 2
    assert one.grad_norm == other.grad_norm
    assert same_bits(small.detach(), huge.detach()[-OWN:])
    assert not torch.equal(small, values)
    for name in ("master", "exp_avg", "exp_avg_sq"):
        assert same_bits(one.state[small][name], other.state[huge][name][-OWN:]), name
    for _, optimizer in trained:
        optimizer.close()
