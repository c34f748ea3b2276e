"""Describes a machine to the planner: sizes and bandwidths per GPU, each with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from superoffload.errors import ArgumentError

GB, GIB = 10**9, 1 << 30

NUMBERS = (
    "gpu_memory", "flops", "gpu_bandwidth", "host_memory", "host_bandwidth", "link_down", "link_up", "collectives",
)  # fmt: skip


@dataclass(frozen=True)
class Hardware:
    """Describes a machine, all per GPU, in bytes, bytes per second and bf16 operations per second.

    `link_down` is GPU to host. `collectives` is what one GPU sends and receives at once within a node, in use.
    `measured` names the numbers that were measured on the machine itself; the others are from a profile.
    """

    name: str
    gpu_memory: float
    flops: float
    gpu_bandwidth: float
    host_memory: float
    host_bandwidth: float
    link_down: float
    link_up: float
    collectives: float
    gpus_per_node: int
    sources: Mapping[str, str] = field(default_factory=dict)
    measured: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in NUMBERS:
            if not getattr(self, name) > 0:
                raise ArgumentError(f"hardware {self.name}: {name}={getattr(self, name)}: expected a positive number")
