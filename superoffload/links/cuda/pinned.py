"""Pins host memory that the device copies from and to: one piece for all buckets, on the device's NUMA node."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from superoffload import _native
from superoffload.errors import warn
from superoffload.host.processors import allowed_cpus

ALIGN = 256
_SPREAD_FROM, _SPREAD = 1 << 20, 5 * ALIGN  # bytes: large arrays start at different lines (superoffload/host/memory.py)
LARGEST_REGISTRATION = 1 << 36  # bytes; some drivers fail when hundreds of GiB are registered at once
_TOUCHING_THREADS = 16
_NODES = Path("/sys/devices/system/node")
_PCI = Path("/sys/bus/pci/devices")


def node_of(pci_bus_id: str, pci: Path = _PCI, nodes: Path = _NODES) -> int:
    """Returns the NUMA node with processors next to a device; -1 if it is unknown or makes no difference.

    On a Superchip the device's own memory is a node without processors. If just one node has processors, it is taken.
    """
    here = _number(pci / pci_bus_id.lower() / "numa_node")
    if here is not None and here >= 0 and _has_processors(nodes / f"node{here}"):
        return here
    with_processors = [node for node in sorted(nodes.glob("node[0-9]*"), key=_index) if _has_processors(node)]
    without = len(list(nodes.glob("node[0-9]*"))) - len(with_processors)
    return _index(with_processors[0]) if without and len(with_processors) == 1 else -1


def free_bytes(node: int, nodes: Path = _NODES) -> int:
    """Returns a node's free memory; 0 where the system does not tell."""
    try:
        lines = (nodes / f"node{node}" / "meminfo").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        words = line.split()
        if "MemFree:" in words:
            return int(words[words.index("MemFree:") + 1]) << 10
    return 0


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _index(node: Path) -> int:
    return int(node.name.removeprefix("node"))


def _has_processors(node: Path) -> bool:
    try:
        return bool((node / "cpulist").read_text().strip())
    except OSError:
        return False


class PinnedArena:
    """Hands out memory from the front, and takes it back as a whole."""

    def __init__(self, gpu: _native.CudaGpu, nbytes: int, *, chunk: int = LARGEST_REGISTRATION) -> None:
        node = node_of(gpu.pci_bus_id)
        self._memory = _native.PinnedMemory(
            gpu=gpu,
            bytes=nbytes,
            node=node,
            strict=node >= 0 and free_bytes(node) > nbytes + (nbytes >> 4),
            threads=min(_TOUCHING_THREADS, len(allowed_cpus())),
            chunk=chunk,
        )
        self._used, self.nbytes = 0, nbytes

    @property
    def pinned(self) -> bool:
        return self._memory.pinned

    @property
    def refusal(self) -> str:
        """Returns the system's reason for refusing to pin it."""
        return self._memory.refusal

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Makes a flat tensor with undefined values. It keeps the memory alive; no copy crosses two registrations."""
        nbytes = numel * dtype.itemsize
        start = place(self._used + taken(nbytes) - aligned(nbytes), nbytes, self._memory.chunk)
        self._used = start + nbytes
        return torch.frombuffer(np.asarray(self._memory), dtype=dtype, count=numel, offset=start)

    def reset(self) -> None:
        """Hands out everything again from the front; no earlier tensor is in use."""
        self._used = 0

    def close(self, *, idle: bool) -> None:
        """Ends the pinning. ``idle=False``: the device may still write, so the memory is never freed."""
        if idle:
            self._memory.unpin()
        else:
            self._memory.leak()


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def taken(nbytes: int) -> int:
    """Returns the most bytes that an array takes of an arena with one registration."""
    return aligned(nbytes) + (_SPREAD if nbytes >= _SPREAD_FROM else 0)


def place(used: int, nbytes: int, chunk: int) -> int:
    """Places the next ``nbytes``: aligned, and not across a multiple of ``chunk``."""
    start = aligned(used)
    if start // chunk != (start + nbytes - 1) // chunk:
        start = -(-start // chunk) * chunk
    return start


def warn_unpinned(arena: PinnedArena) -> None:
    """Warns of an arena that could not be pinned: training works, but slower."""
    if not arena.pinned:
        warn(
            f"the system refused to pin {arena.nbytes / 2**30:.2f} GiB of host memory ({arena.refusal}). "
            "Training goes on with ordinary memory: copies no longer overlap with backward. Raise the limit (ulimit -l "
            "unlimited, or memlock in /etc/security/limits.conf; docker run --ulimit memlock=-1), or free memory"
        )
