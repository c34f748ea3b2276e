"""Trains a model of any size in virtual time, with the real engine and a real schedule.

Every layer is a shard of a thousand elements that stands for its share of the parameters: the kernels really step it,
and the clock counts the bytes that the whole layer would move.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.emulation.clock import VirtualClock
from benchmarks.emulation.link import VirtualLink
from benchmarks.emulation.machine import Machine, Workload
from benchmarks.emulation.virtual_pool import VirtualPool
from superoffload.engine.bucket import BLOCK, GroupHyper, Shard
from superoffload.engine.engine import Engine
from superoffload.engine.options import EngineOptions
from superoffload.engine.schedule import Schedule

_NORM = 4.0  # times the threshold in a step that clips; its reciprocal in others
_VARIETY = 8  # sets of gradients that take turns


class EmulatedTraining:
    """Trains by ``step(clips)``, which returns a step's seconds on the virtual clock."""

    def __init__(
        self,
        workload: Workload,
        machine: Machine,
        schedule: Schedule,
        *,
        on_demand: bool = True,
        stages: bool = True,
        norm: float = _NORM,
        seed: int = 0,
    ) -> None:
        self.clock = VirtualClock()
        self._workload = workload
        self._on_demand = on_demand
        self._norm = norm
        scale = workload.parameters / (workload.layers * BLOCK)
        link = VirtualLink(
            self.clock,
            lambda size: machine.latency + size * scale / machine.down,
            lambda size: machine.latency + size * scale / machine.up,
            stages=lambda bucket: stages,
        )
        pool = VirtualPool(self.clock, lambda operation, numel: machine.seconds(operation, numel * scale))
        options = EngineOptions(
            schedule.mode, BLOCK, [-1], two_phase=True, schedule=schedule, clock=self.clock.seconds, pool=pool
        )
        hyper = GroupHyper(1e-4, 0.9, 0.999, 1e-8, 0.01)
        self.engine = Engine(link, options, lambda group: hyper)
        generator = torch.Generator().manual_seed(seed)
        self.published = [torch.randn(BLOCK, generator=generator).bfloat16() for _ in range(workload.layers)]
        self.engine.layout.add_shards([layer_shard(layer, published) for layer, published in enumerate(self.published)])
        self._gradients = [_gradients(workload.layers, generator) for _ in range(_VARIETY)]
        self._steps = 0
        self._ended = 0.0

    def step(self, clips: bool) -> float:
        """Runs forward, backward and step; the norm is ``norm`` times the threshold if it ``clips``, else a quarter."""
        workload, engine, clock = self._workload, self.engine, self.clock
        gradients, norm = self._gradients[self._steps % _VARIETY]
        max_grad_norm = norm / self._norm if clips else norm * _NORM
        for shard in engine.shards:
            engine.tail.land(shard)
            clock.advance(workload.first_forward / workload.layers)
        clock.advance(workload.between)
        engine.speculator.expect(unscale=1.0, max_grad_norm=max_grad_norm)
        for shard in reversed(engine.shards):
            clock.advance(workload.last_backward / workload.layers)
            engine.arrive(shard, gradients[shard.index])
        engine.apply(engine.decide(unscale=1.0, max_grad_norm=max_grad_norm), later=self._on_demand)
        self._steps += 1
        began, self._ended = self._ended, clock.now
        return self._ended - began

    def run(self, trace: Sequence[bool]) -> list[float]:
        """Returns the seconds of each step; ``trace``: which ones clip."""
        seconds = [self.step(clips) for clips in trace]
        self.engine.close()
        return seconds


def layer_shard(layer: int, published: Tensor) -> Shard:
    """Returns a layer as one shard; ``published``: its parameters, flat, in bf16."""
    return Shard(
        index=layer,
        name=f"layer {layer}",
        group=0,
        numel=published.numel(),
        gradient_dtype=torch.bfloat16,
        published_dtype=torch.bfloat16,
        master=published.float(),
        exp_avg=torch.zeros(published.numel()),
        exp_avg_sq=torch.zeros(published.numel()),
        target=lambda: published,
    )


def _gradients(layers: int, generator: torch.Generator) -> tuple[list[Tensor], float]:
    gradients = [torch.randn(BLOCK, generator=generator).bfloat16() for _ in range(layers)]
    return gradients, float(torch.cat(gradients).float().norm())
