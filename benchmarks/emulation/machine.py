"""Describes what is emulated: bandwidths and latencies of processors and link, and the seconds of a model's layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from superoffload import _native
from superoffload.engine.schedule import BYTES

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


# The processors and the link of a GH200 while transfers run, by published measurements (docs/plan.md).
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
