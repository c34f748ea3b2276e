"""Drives the engine over one rank's ZeRO partitions, without any name of DeepSpeed's.

A *window* is everything between two steps. Every parameter's partition is a shard, so that a bucket is speculated as
soon as its few parameters are final, whatever the size of DeepSpeed's sub-groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from superoffload.engine.bucket import Bucket, BucketState, GroupHyper, Shard
from superoffload.engine.engine import Engine
from superoffload.engine.options import EngineOptions
from superoffload.engine.placement import Placer, Residency
from superoffload.engine.verdict import Verdict
from superoffload.errors import ArgumentError, KernelsUnavailable
from superoffload.host.bits import same_but_for_nan
from superoffload.host.memory import host_empty
from superoffload.links.base import Link, PackTicket
from superoffload.links.host import HostLink, SynchronousLink

# ---- the link -------------------------------------------------------------------------------------------------------
# Gradients stay in DeepSpeed's flat host buffer, parameters go to its partitions.


class PartitionLink(SynchronousLink):
    """Packs gradients in place: the packed gradient is the partition in the flat buffer, so there is no second buffer.

    Writers of the flat buffer must ``retract()`` the shard first. ``writes_partitions``: steps do so, also during
    backward. ``accelerator`` serves the buckets whose state and gradients are on it; this link owns it.
    """

    def __init__(
        self, gradients: Mapping[int, Tensor], *, writes_partitions: bool, accelerator: Link | None = None
    ) -> None:
        """Takes gradients by the shard's index, and ``accelerator``; with None no bucket's state is on a device."""
        super().__init__()
        self._gradients = gradients
        self._writes_partitions = writes_partitions
        self._accelerator: Link = accelerator or HostLink()  # one without buckets

    def prepare(self, buckets: Sequence[Bucket], *, anew: bool) -> None:
        super().prepare(buckets, anew=anew)
        if anew:
            self.pinned_bytes = 0
        self._accelerator.prepare([bucket for bucket in buckets if bucket.resident], anew=anew)

    def check_stream(self) -> None:
        self._accelerator.check_stream()

    def received(self, bucket: Bucket) -> None:
        if bucket.resident:
            self._accelerator.received(bucket)

    def attach(self, bucket: Bucket) -> None:
        gradients = [piece.of(self._gradients[piece.shard.index]) for piece in bucket.pieces]
        # The upper half of a split master must stay where no writer of the parameter reaches it.
        if self._writes_partitions and not bucket.splits_masters:
            published = [piece.of(piece.shard.target()) for piece in bucket.pieces]
            return bucket.use_memory(gradients=gradients, published=published)
        if bucket.pieces[0].shard.target().device.type != "cpu":
            shadow = torch.empty(bucket.padded, dtype=bucket.published_dtype, pin_memory=True, device="cpu")
            self.pinned_bytes += shadow.nbytes
        else:
            shadow = host_empty(bucket.padded, bucket.published_dtype)
        bucket.use_memory(gradients=gradients, shadow=shadow)

    def pack(self, bucket: Bucket, grads: Sequence[Tensor | None]) -> PackTicket:
        if bucket.resident:
            return self._accelerator.pack(bucket, grads)
        assert bucket.gradients is not None
        for piece, here, grad in zip(bucket.pieces, bucket.gradients, grads, strict=True):
            assert here is not None
            address = here.data_ptr() - here.element_size() * piece.start
            assert grad is None or grad.data_ptr() == address, "another gradient buffer"
        return self.pack_pieces(bucket, grads)

    def close(self) -> None:
        self._accelerator.close()


# ---- DeepSpeed's "ratio" below 1 ------------------------------------------------------------------------------------
# DeepSpeed chooses the sub-groups whose state stays on the accelerator (the first in forward order, whose gradients
# come last) and makes their masters there. Their gradients stay there too, and only block sums come down.


def resident_sub_groups(devices: Mapping[int, str]) -> frozenset[int]:
    """Returns the sub-groups that ``subgroup_to_device`` puts on an accelerator; none if that is the CPU."""
    return frozenset(sub_group for sub_group, device in devices.items() if device != "cpu")


def check_resident(masters: Mapping[int, Tensor], published: Mapping[int, Tensor]) -> None:
    """Checks that masters and parameters share a device: the kernel that steps a master also writes the parameter."""
    for sub_group, master in masters.items():
        if published[sub_group].device != master.device:
            raise ArgumentError(
                f'"offload_optimizer": "ratio" below 1 together with "offload_param": the parameters of sub-group '
                f"{sub_group} are on {published[sub_group].device}, their state on {master.device}; set ratio to 1.0"
            )


def accelerator_link(device: torch.device) -> Link:
    """Makes the link that packs and steps on ``device``. KernelsUnavailable: its kernels could not be compiled."""
    from superoffload.links.cuda.link import cuda_link  # loads the driver

    link = cuda_link(device, keep_grads=True)
    if link.residency is None:
        link.close()
        raise KernelsUnavailable(
            '"offload_optimizer": "ratio" below 1: state on the accelerator is stepped by kernels, which could not be '
            "compiled (see the warning before this); make NVRTC available, or set ratio to 1.0"
        )
    return link


class GivenPlaces(Placer):
    """Leaves shards where DeepSpeed has put them."""

    def __init__(self, residency: Residency) -> None:
        super().__init__(0.0, residency)
        self.why = "as DeepSpeed's ratio says"

    def choose(self, shards: Sequence[Shard]) -> set[int]:
        return {shard.index for shard in shards if shard.resident}


# ---- partitions and windows -----------------------------------------------------------------------------------------


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
        writes_partitions: bool,
        accelerator: Link | None = None,
    ) -> None:
        """``writes_partitions``: steps do so, also during backward; readers must call ``deliver()`` first."""
        self._writes_partitions = writes_partitions
        self.partitions = {partition.key: partition for partition in partitions}
        self.steps = [0] * sub_groups
        gradients = {partition.shard.index: partition.gradient for partition in partitions}
        link = PartitionLink(gradients, writes_partitions=writes_partitions, accelerator=accelerator)
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
        self.engine.last_step.land(partition.shard)
        self.engine.retract(partition.shard)

    def final(self, partition: Partition, *, unscale: float, max_grad_norm: float | None) -> None:
        """Hands over a gradient in host memory that is most likely final: its bucket may be speculated."""
        if self.engine.has_gradient(partition.shard) or (partition.shard.apart and self._writes_partitions):
            return
        if not self.engine.is_filling:
            self.engine.speculator.expect(unscale=unscale, max_grad_norm=max_grad_norm)
        self.engine.arrive(partition.shard, partition.gradient)

    def close_window(self, trains: Callable[[int], bool]) -> Window:
        """Makes every gradient final. Unused parameters get zeros, as without offload; frozen ones get no gradient."""
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
            self.engine.last_step.land(shard)
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
        """Brings the last step's values into the parameters' partitions, and takes back what was speculated there.
        None: all of them, none of which is speculated."""
        if keys is None:
            self.engine.last_step.land()
            return
        for key in keys:
            partition = self.partitions.get(key)
            if partition is None:
                continue
            self.engine.last_step.land(partition.shard)
            buckets = self.engine.layout.buckets_of(partition.shard)
            if any(bucket.published and bucket.state is BucketState.SPECULATED for bucket in buckets):
                self.engine.restore(partition.shard)

    def settle(self, key: int) -> None:
        """Brings master and moments of a parameter to the last step's values, so that they may be written."""
        self.engine.restore(self.partitions[key].shard)

    def take_over(self, key: int) -> None:
        """Makes the master follow a written partition, except where the master rounds to the written value."""
        partition = self.partitions.get(key)
        if partition is None:
            return
        self.settle(key)
        shard = partition.shard
        published = shard.target().detach()
        shard.follow(published)
        if self._writes_partitions and shard.upper is None:  # of a tie's two neighbours, an undo publishes one
            shard.apart = not same_but_for_nan(published, shard.master.to(published.dtype))

    def close(self) -> None:
        """Undoes what was speculated, delivers what was not delivered, ends the worker threads."""
        self.engine.close()
