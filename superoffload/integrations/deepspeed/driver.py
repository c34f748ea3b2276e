"""Drives the engine over one rank's ZeRO-3 partitions, without any name of DeepSpeed's.

A *window* is everything between two steps. Every parameter's partition is a shard, so that a bucket is speculated as
soon as its few parameters are final, whatever the size of DeepSpeed's sub-groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from superoffload.engine.bucket import GroupHyper, Shard
from superoffload.engine.engine import Engine
from superoffload.engine.options import EngineOptions
from superoffload.engine.placement import Residency
from superoffload.engine.verdict import Verdict
from superoffload.integrations.deepspeed.link import PartitionLink
from superoffload.integrations.deepspeed.residency import GivenPlaces
from superoffload.links.base import Link
from superoffload.optimizer.masters import follow


@dataclass(eq=False)
class Partition:
    """Holds one parameter's partition on this rank; its shard is empty where the rank holds none of its elements."""

    key: int
    sub_group: int
    shard: Shard
    gradient: Tensor  # its slice of a flat gradient buffer, without padding
    padded: Tensor  # the same slice with its padding
    arrivals: int = 0  # gradients since the last step
    expected: int = 1  # how many arrived in the window before this one
    written: bool = False  # the slice holds anything but zeros

    def take(self, incoming: Tensor) -> None:
        """Adds a reduced gradient; its copy may still run on the current stream."""
        self.arrivals += 1
        incoming = incoming.view(-1)[: self.shard.numel]
        if self.arrivals == 1:
            self.gradient.copy_(incoming, non_blocking=True)
        elif incoming.device == self.gradient.device:
            self.gradient.add_(incoming.to(self.gradient.dtype))
        else:  # add on the device, where it is fast
            there = self.gradient.to(incoming.device, non_blocking=True)
            there.add_(incoming.to(there.dtype))
            self.gradient.copy_(there, non_blocking=True)
        self.written = True

    def written_from_outside(self) -> None:
        """Notes that a user writes the slice: it is a gradient now, whether one has arrived or not."""
        self.arrivals = max(1, self.arrivals)
        self.written = True

    def clear(self) -> None:
        self.gradient.zero_()
        self.written = False

    def abandon(self) -> None:
        """Ends the window without a step; its count does not predict the next one."""
        self.arrivals = 0

    def begin_window(self) -> None:
        """Begins a window, which most likely gets as many gradients as the last one."""
        self.expected = max(1, self.arrivals)
        self.arrivals = 0


@dataclass
class Window:
    """Holds the sum of squares of every shard with a gradient, by index; empty if no gradient came."""

    sums: dict[int, float]

    @property
    def sum_of_squares(self) -> float:
        return sum(self.sums.values())


class PartitionDriver:
    """Takes gradients and a verdict, and publishes parameters."""

    def __init__(
        self,
        partitions: Sequence[Partition],
        sub_groups: int,
        options: EngineOptions,
        hyper_of: Callable[[int], GroupHyper],
        *,
        pin: bool,
        accelerator: Link | None = None,
    ) -> None:
        self.partitions = {partition.key: partition for partition in partitions}
        self.steps = [0] * sub_groups
        gradients = {partition.shard.index: partition.gradient for partition in partitions}
        link = PartitionLink(lambda shard: gradients[shard.index], pin=pin, accelerator=accelerator)
        residency: Residency | None = getattr(accelerator, "residency", None)
        placer = GivenPlaces(residency) if residency is not None else None
        self.engine = Engine(link, options, hyper_of, placer=placer)
        self.engine.layout.add_shards([partition.shard for partition in partitions])

    # ---- gradients ------------------------------------------------------------------------------------------------

    def take(self, key: int, incoming: Tensor) -> Partition:
        """Adds a reduced gradient partition to the window; its copy may still run on the current stream."""
        partition = self.partitions[key]
        self.retract(partition)
        partition.take(incoming)
        return partition

    def retract(self, partition: Partition) -> None:
        """Frees a gradient for writing: ends its readers and undoes what was speculated with it."""
        self.engine.tail.land(partition.shard)
        self.engine.retract(partition.shard)

    def final(self, partition: Partition, *, unscale: float, max_grad_norm: float | None) -> None:
        """Hands over a gradient in host memory that is most likely final: its bucket may be speculated."""
        if self.engine.has_gradient(partition.shard):
            return
        if not self.engine.is_filling:
            self.engine.speculator.expect(unscale=unscale, max_grad_norm=max_grad_norm)
        self.engine.arrive(partition.shard, partition.gradient)

    def close_window(self, trains: Callable[[int], bool]) -> Window:
        """Makes every gradient final. Unused parameters get zeros, as in ZeRO-1 and 2; frozen ones get no gradient."""
        if not any(partition.arrivals for partition in self.partitions.values()):
            return Window({})
        for partition in self.partitions.values():
            shard = partition.shard
            if self.engine.has_gradient(shard):
                continue
            if partition.arrivals == 0:
                if not trains(partition.key):
                    continue
                self._clear(partition)
            self.engine.tail.land(shard)
            self.engine.arrive(shard, partition.gradient, in_backward=False)
        self.engine.decide(unscale=1.0, max_grad_norm=None)
        self.engine.await_speculation()
        present = filter(self.engine.has_gradient, self.engine.shards)
        return Window({shard.index: shard.sum_of_squares() for shard in present})

    def _clear(self, partition: Partition) -> None:
        if partition.written:
            self.retract(partition)
            partition.clear()

    # ---- the end of a window --------------------------------------------------------------------------------------

    def step(self, verdict: Verdict, *, later: bool) -> None:
        """Commits, replays, steps or skips. With ``later`` the parameters arrive by ``deliver()``."""
        done = self.engine.stats()["steps"]
        try:
            self.engine.apply(verdict, later=later)
        finally:
            if self.engine.stats()["steps"] != done:
                self.set_steps([steps + 1 for steps in self.steps])
            for partition in self.partitions.values():
                partition.begin_window()

    def abandon(self) -> None:
        """Ends the window without a step: nothing has changed."""
        self.engine.abandon()
        for partition in self.partitions.values():
            partition.abandon()

    def set_steps(self, steps: Sequence[int]) -> None:
        """Sets the number of steps of each sub-group, which is how checkpoints count."""
        self.steps = list(steps)
        for partition in self.partitions.values():
            partition.shard.set_steps(self.steps[partition.sub_group])

    # ---- readers and writers --------------------------------------------------------------------------------------

    def deliver(self, keys: Sequence[int] | None = None) -> None:
        """Brings the last step's values into the parameters' partitions. None: all of them."""
        if keys is None:
            self.engine.tail.land()
            return
        for key in keys:
            partition = self.partitions.get(key)
            if partition is not None:
                self.engine.tail.land(partition.shard)

    def settle(self, key: int) -> None:
        """Brings master and moments of a parameter to the last step's values, so that they may be written."""
        self.engine.restore(self.partitions[key].shard)

    def take_over(self, key: int) -> None:
        """Makes the master follow a written partition, except where the master rounds to the written value."""
        partition = self.partitions.get(key)
        if partition is None:
            return
        self.settle(key)
        follow(partition.shard, partition.shard.target().detach())

    def close(self) -> None:
        """Undoes what was speculated, delivers what was not delivered, ends the worker threads."""
        self.engine.close()
