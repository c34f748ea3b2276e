"""Trains a model of any size in virtual time, with the real engine and a real schedule.

Every layer is a shard of a thousand elements that stands for its share of the parameters: the kernels really step it,
and the clock counts the bytes that the whole layer would move.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.emulation.clock import VirtualClock
from benchmarks.emulation.link import VirtualLink
from benchmarks.emulation.virtual_pool import VirtualPool
from superoffload import _native
from superoffload.engine.bucket import BLOCK, GroupHyper, Shard
from superoffload.engine.engine import Engine
from superoffload.engine.options import EngineOptions
from superoffload.engine.schedule import BYTES, Schedule

Operation = _native.Operation


@dataclass(frozen=True)
class Machine:
    """Holds bytes per second, and seconds. ``bytes_of``: bytes per parameter of an operation; undo counts as a step."""

    memory: float
    down: float
    up: float
    latency: float = 0.0  # of every copy
    overhead: float = 0.0  # of handing one operation to the worker threads
    bytes_of: Mapping[Operation, float] = field(default_factory=lambda: {**BYTES, Operation.undo: 28.0})

    def seconds(self, operation: Operation, numel: float) -> float:
        return self.overhead + self.bytes_of[operation] * numel / self.memory


# The processors and the link of a GH200 while transfers run, by published measurements (docs/settings.md).
GRACE = Machine(memory=420e9, down=297e9, up=375e9)
# The same processors behind PCI Express 5 x16, at the planner's share of its nominal bandwidth.
BEHIND_PCIE = Machine(memory=420e9, down=54e9, up=54e9)
# One H200's, with 14 worker threads, while transfers run (docs/benchmarks.md).
H200 = Machine(memory=127e9, down=50e9, up=50e9, overhead=5e-5)


@dataclass(frozen=True)
class Workload:
    """Describes a model of ``layers`` equal layers, each a shard and a bucket, and its compute time per step.

    ``forward``, ``backward``: of all ``micro_batches`` of a step together.
    """

    parameters: float
    forward: float
    backward: float
    layers: int = 64
    micro_batches: int = 1

    @staticmethod
    def of_tokens(parameters: float, tokens: float, flops: float, layers: int = 64, micro_batches: int = 1) -> Workload:
        """Counts two floating-point operations per parameter and token forward, four backward."""
        forward = 2 * parameters * tokens / flops
        return Workload(parameters, forward, 2 * forward, layers, micro_batches)

    @property
    def first_forward(self) -> float:
        return self.forward / self.micro_batches

    @property
    def last_backward(self) -> float:
        """Returns the time of the backward in which gradients become final."""
        return self.backward / self.micro_batches

    @property
    def between(self) -> float:
        """Returns the time between the two: no parameter is read for the first time, no gradient becomes final."""
        return self.forward + self.backward - self.first_forward - self.last_backward

    def bound(self, machine: Machine) -> float:
        """Returns the shortest possible step: the model must compute, and every parameter must be stepped."""
        return max(self.forward + self.backward, machine.seconds(Operation.step, self.parameters))


# ---- training -----------------------------------------------------------------------------------------------------

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
        generator = torch.Generator().manual_seed(0)
        published = [torch.randn(BLOCK, generator=generator).bfloat16() for _ in range(workload.layers)]
        self.engine.layout.add_shards([_layer(layer, values) for layer, values in enumerate(published)])
        self._gradients = [_gradients(workload.layers, generator) for _ in range(_VARIETY)]
        self._steps = 0
        self._ended = 0.0

    def step(self, clips: bool) -> float:
        """Runs forward, backward and step; the norm is ``norm`` times the threshold if it ``clips``, else a quarter."""
        workload, engine, clock = self._workload, self.engine, self.clock
        gradients, norm = self._gradients[self._steps % _VARIETY]
        max_grad_norm = norm / self._norm if clips else norm * _NORM
        for shard in engine.shards:
            engine.last_step.land(shard)
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


def _layer(layer: int, published: Tensor) -> Shard:
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
