"""Gives measurements a device: links to it, waiting for it, its memory, delays. A CPU is one too."""

from __future__ import annotations

import os
import random
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks.gpu_suite.settings import GIB
from superoffload.errors import ArgumentError
from superoffload.host.system import System, usable_memory
from superoffload.links.cuda.device import peak_active_bytes

LONGEST_DELAY = 2e-3  # seconds
_CYCLES_PER_SECOND = 1.5e9  # about; what counts is that delays differ


class Device:
    """Represents the CPU: nothing runs asynchronously, and it has no memory of its own."""

    kind = "cpu"

    def __init__(self) -> None:
        self.torch = torch.device("cpu")
        self._available = usable_memory(System())
        self._least_available = self._available

    @contextmanager
    def links(self, **options: Any) -> Iterator[None]:
        """Gives each AdamW made inside a link with these fields of CudaOptions, if the device has such links."""
        yield

    def prepare(self, model: nn.Module) -> None:
        """Makes the model's modules read what streams have delivered; called after the optimizer is made."""

    def catch_up(self) -> None:
        """Waits before the host reads parameters, as a GPU's reads are ordered by streams only."""

    def synchronize(self) -> None: ...

    def streams_of(self, link: Any) -> list[Any]:
        """Returns the link's own streams; a host link has none."""
        return []

    def cap(self, gib: float) -> None:
        raise ArgumentError(f"capped_gib={gib:g}: only a GPU's memory can be capped; leave it out on the CPU")

    def start_of_peaks(self) -> None:
        """Starts counting peaks, after the model is built."""

    def sample(self) -> None:
        """Samples the memory in use, outside of timed steps."""
        now = usable_memory(System())
        if now is not None and self._least_available is not None:
            self._least_available = min(self._least_available, now)

    def memory(self) -> dict[str, int | None]:
        """Returns peaks in bytes; the machine's loss too, since the resident size may lack pinned memory."""
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        taken = None
        if self._available is not None and self._least_available is not None:
            taken = self._available - self._least_available
        return {
            "host_peak_resident_bytes": resident * 1024,
            "host_peak_resident_bytes_of_a_child": children * 1024,
            "host_taken_bytes": taken,
        }

    def facts(self) -> dict[str, Any]:
        return {"device": "cpu"}

    def delay(self, generator: random.Random, stream: Any = None) -> None:
        """Keeps ``stream`` (None: the current one) busy for a random while."""
        time.sleep(generator.random() * LONGEST_DELAY)


class Cuda(Device):
    """Represents one GPU through torch, with peaks of torch's own allocator, and of all processes on the device."""

    kind = "cuda"

    def __init__(self, name: str) -> None:
        super().__init__()
        index = torch.device(name).index
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.torch = torch.device("cuda", local_rank if index is None else index)
        torch.cuda.set_device(self.torch)
        torch.cuda.init()
        self._used_before = self._used()
        self._most_used = 0

    def _used(self) -> int:
        free, total = torch.cuda.mem_get_info(self.torch)
        return int(total - free)

    @contextmanager
    def links(self, **options: Any) -> Iterator[None]:
        from superoffload.links.cuda import link

        options_for = link.options_for

        def changed(*arguments: Any, **named: Any) -> Any:
            return replace(options_for(*arguments, **named), **options)

        with mock.patch.object(link, "options_for", changed) if options else nullcontext():
            yield

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch)

    def streams_of(self, link: Any) -> list[Any]:
        handles = [getattr(link, f"_{name}_stream") for name in ("pack", "down", "up")]
        return [torch.cuda.ExternalStream(handle, device=self.torch) for handle in handles]

    def cap(self, gib: float) -> None:
        total = torch.cuda.get_device_properties(self.torch).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, gib * GIB / total), self.torch)

    def start_of_peaks(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.torch)
        self._most_used = 0

    def sample(self) -> None:
        super().sample()
        self._most_used = max(self._most_used, self._used() - self._used_before)

    def memory(self) -> dict[str, int | None]:
        return {
            **super().memory(),
            "gpu_peak_active_bytes": peak_active_bytes(self.torch),
            "gpu_peak_reserved_bytes": torch.cuda.max_memory_reserved(self.torch),
            "gpu_used_bytes": self._most_used,
        }

    def facts(self) -> dict[str, Any]:
        properties = torch.cuda.get_device_properties(self.torch)
        return {"device": properties.name, "gpu_memory_bytes": properties.total_memory, "cuda": torch.version.cuda}

    def delay(self, generator: random.Random, stream: Any = None) -> None:
        cycles = int(generator.random() * LONGEST_DELAY * _CYCLES_PER_SECOND)
        sleep: Any = torch.cuda._sleep
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            sleep(cycles)


def open_device(name: str) -> Device:
    """Opens cpu, cuda, cuda:N, or stand-in."""
    if name == "cpu":
        return Device()
    if name == "stand-in":
        from benchmarks.gpu_suite.stand_in import StandIn

        return StandIn()
    if name.partition(":")[0] != "cuda":
        raise ArgumentError(f"device={name}: expected cpu, cuda, cuda:N or stand-in")
    if not torch.cuda.is_available():
        raise ArgumentError(f"device={name}: torch sees no CUDA device; --device cpu --toy tries the same code paths")
    return Cuda(name)
