"""Emulates the accelerator in wall-clock time: layers and copies sleep, the processors do their real work.

So it measures the real engine with real worker threads, beside a model that takes none of their time.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.emulation.machine import Machine, Workload
from benchmarks.emulation.training import layer_shard
from superoffload import _native
from superoffload.engine.bucket import Bucket, GroupHyper
from superoffload.engine.engine import Engine
from superoffload.engine.options import EngineOptions
from superoffload.engine.schedule import Schedule
from superoffload.links.base import PackTicket, wait_until_ended
from superoffload.links.host import HostLink

_BEHIND = 5e-4  # seconds; a sleep that ends at most this late shortens the next one


class Pacer:
    """Sleeps so that durations add up: a sleep that ends late shortens the next."""

    def __init__(self) -> None:
        self._due = 0.0

    def spend(self, seconds: float) -> None:
        now = time.perf_counter()
        began = self._due if 0 <= now - self._due < _BEHIND else now
        self._due = began + seconds
        if self._due > now:
            time.sleep(self._due - now)


class _Engine(threading.Thread):
    """Emulates a copy engine: one copy after the other, in order, each as long as its bytes take."""

    def __init__(self, name: str, bandwidth: float) -> None:
        super().__init__(name=name, daemon=True)
        self._bandwidth = bandwidth
        self._jobs: queue.SimpleQueue[tuple[int, Callable[[], None], _native.Completion] | None] = queue.SimpleQueue()
        self.start()

    def copy(self, size: int, work: Callable[[], None]) -> _native.Completion:
        done = _native.Completion()
        self._jobs.put((size, work, done))
        return done

    def run(self) -> None:
        pacer = Pacer()
        while (job := self._jobs.get()) is not None:
            size, work, done = job
            try:
                work()
                pacer.spend(size / self._bandwidth)
                done.finish()
            except Exception as error:
                done.fail(f"emulated link: {error}")

    def end(self) -> None:
        self._jobs.put(None)
        self.join()


class PacedLink(HostLink):
    """Copies in memory, as slowly as the emulated link."""

    asynchronous = True

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._down = _Engine("emulated link, down", machine.down)
        self._up = _Engine("emulated link, up", machine.up)
        self._open = True

    def pack(self, bucket: Bucket, grads: Sequence[Tensor | None]) -> PackTicket:
        size = bucket.numel * bucket.gradient_dtype.itemsize

        def copy() -> None:
            HostLink.pack(self, bucket, grads)

        return PackTicket(self._down.copy(size, copy))

    def deliver(self, bucket: Bucket, after: _native.Completion) -> _native.Completion:
        size = bucket.numel * bucket.published_dtype.itemsize
        pieces = [piece for piece, present in zip(bucket.pieces, bucket.present, strict=True) if present]

        def copy() -> None:
            wait_until_ended(after)
            for piece in pieces:
                source = bucket.shadow[piece.offset : piece.offset + piece.numel]
                piece.shard.target()[piece.start : piece.start + piece.numel].copy_(source)
            self.bytes_up += size

        return self._up.copy(size, copy)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._down.end()
            self._up.end()


class PacedTraining:
    """Trains a model without arithmetic: a gradient arrives when its layer's time has passed."""

    def __init__(
        self,
        workload: Workload,
        machine: Machine,
        schedule: Schedule,
        cpus: Sequence[int],
        *,
        on_demand: bool,
        seed: int = 0,
    ) -> None:
        self._workload = workload
        self._on_demand = on_demand
        self._pacer = Pacer()
        numel = int(workload.parameters) // workload.layers
        options = EngineOptions(schedule.mode, numel, cpus, two_phase=True, schedule=schedule)
        hyper = GroupHyper(1e-4, 0.9, 0.999, 1e-8, 0.01)
        self.engine = Engine(PacedLink(machine), options, lambda group: hyper)
        generator = torch.Generator().manual_seed(seed)
        self.published = [torch.randn(numel, generator=generator).bfloat16() for _ in range(workload.layers)]
        self.engine.layout.add_shards([layer_shard(layer, published) for layer, published in enumerate(self.published)])
        self._gradients = [torch.randn(numel, generator=generator).bfloat16() for _ in range(workload.layers)]
        self._norm = float(sum(float(gradient.float().square().sum()) for gradient in self._gradients)) ** 0.5
        self._ended = time.perf_counter()

    def step(self, clips: bool) -> float:
        """Runs forward, backward and step; returns seconds since the end of the previous step."""
        workload, engine = self._workload, self.engine
        max_grad_norm = self._norm * (0.25 if clips else 4.0)
        for shard in engine.shards:
            engine.tail.land(shard)
            self._pacer.spend(workload.forward / workload.layers)
        engine.speculator.expect(unscale=1.0, max_grad_norm=max_grad_norm)
        for shard in reversed(engine.shards):
            self._pacer.spend(workload.backward / workload.layers)
            engine.arrive(shard, self._gradients[shard.index])
        engine.apply(engine.decide(unscale=1.0, max_grad_norm=max_grad_norm), later=self._on_demand)
        began, self._ended = self._ended, time.perf_counter()
        return self._ended - began

    def rest(self) -> None:
        """Waits until nothing runs; the next step's time begins now."""
        self.engine.quiesce()
        self._ended = time.perf_counter()

    def close(self) -> None:
        self.engine.close()
