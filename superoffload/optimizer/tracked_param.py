"""A parameter is watched, so that its master follows edits of its value."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from superoffload.distributed.ownership import Holding
from superoffload.engine.bucket import Shard
from superoffload.engine.moments import EXP_AVG, EXP_AVG_SQ, write_moment
from superoffload.errors import DeviceError, StateError
from superoffload.host.bits import BitSums, Sums
from superoffload.host.tensors import is_dtensor, local_of, memory_order, version_of
from superoffload.optimizer.arguments import check_parameter
from superoffload.optimizer.masters import follow
from superoffload.optimizer.shown_steps import ShownSteps
from superoffload.optimizer.state_dict import ParamState
from superoffload.optimizer.tracked_gradient import UNKNOWN, PackedSums, TrackedGradient, end_all


class Place:
    """Knows a tensor's storage, address and strides.

    It keeps the storage's record alive, not its memory. So the memory can be freed, and a later storage at the same
    address still differs.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._rest = (tensor.data_ptr(), tensor.stride())

    def is_of(self, tensor: Tensor) -> bool:
        same_storage: bool = tensor.untyped_storage()._cdata == self._storage.cdata
        return same_storage and (tensor.data_ptr(), tensor.stride()) == self._rest


class _Referable:
    """Lets hooks refer to an object with slots weakly."""

    __slots__ = ("__weakref__",)


@dataclass(eq=False, slots=True)
class TrackedParam(_Referable):
    """Knows a parameter, its shard, and the last known value and gradient."""

    param: Tensor
    shard: Shard
    steps: ShownSteps
    number: int  # among them
    holding: Holding  # which elements of the parameter the shard is
    bits: BitSums  # sums bits of parameters and gradients; one for all parameters of an optimizer
    early: bool = True  # the gradient is final when its hook runs, and is not reduced over ranks later
    readable: bool = True  # a read finds the bits that were published last
    version: tuple[int, int] = UNKNOWN
    sums: Sums | None = None  # of its bits, if they are compared
    shown_steps: int = 0
    was_moved: bool = False  # to another storage, since ``Params.check_apart()``
    has_stepped: bool = False  # by this optimizer, so that the dtype of its gradients is known
    step: Tensor = field(init=False)  # shown as state[p]["step"]
    device: torch.device = field(init=False)  # where it must stay
    place: Place = field(init=False)
    address: int = field(init=False)
    is_dtensor: bool = field(init=False)
    is_plain: bool = field(init=False)  # an ordinary tensor, in the order of its dimensions, all of it here
    gradient: TrackedGradient = field(init=False)

    def __post_init__(self) -> None:
        local = local_of(self.param)
        self.step = self.steps.at(self.number)
        self.device = local.device
        self.place = Place(local)
        self.address = local.data_ptr()
        self.is_dtensor = is_dtensor(self.param)
        self.is_plain = self.readable and self.holding.is_memory_of(self.param)
        self.gradient = TrackedGradient(self.param, self.shard, self.holding, self.bits)

    # ---- the step -------------------------------------------------------------------------------------------------

    def has_moved(self) -> bool:
        """Whether the step that ends has moved it."""
        moved = self.shown_steps != self.shard.steps
        if moved:
            self.shown_steps = self.shard.steps
            self.has_stepped = True
        return moved

    def is_final_early(self) -> None:
        """Notes that its gradient is final when its hook runs."""
        self.early = True
        self.shard.gradient_is_final()

    # ---- the value ------------------------------------------------------------------------------------------------

    def remember_value(self) -> None:
        remember_values([self])

    def remember(self, sums: Sums | None) -> None:
        """Remembers the value as ours, with these sums; None: its bits are not compared until the next call."""
        self.version, self.sums = version_of(self.param), sums
        local = local_of(self.param)
        if not self.place.is_of(local):
            self._is_at(local)

    def _is_at(self, local: Tensor) -> None:
        self.place, self.address, self.was_moved = Place(local), local.data_ptr(), True

    def is_apart(self) -> None:
        """Notes that no other parameter has the same memory."""
        self.was_moved = False

    def remember_plain(self, address: int, sums: Sums) -> None:
        """Remembers the value of an ordinary parameter in host memory, which is at ``address``."""
        self.version, self.sums = (self.param._version, 0), sums
        if address != self.address:
            self._is_at(self.param)

    def is_outdated(self) -> None:
        """Remembers the version that was raised because the value will be delivered."""
        self.version = version_of(self.param)

    def forget_value(self) -> None:
        """Has the parameter's value count as written by the user."""
        self.version = UNKNOWN

    @property
    def plainly_written(self) -> bool:
        """Returns whether version or storage show a write since the value was remembered; reads no values."""
        local = local_of(self.param)
        return version_of(self.param) != self.version or not self.place.is_of(local) or local.is_neg()

    @property
    def is_in_its_storage(self) -> bool:
        """Returns whether an ordinary parameter, whose bits are not compared, is in the same storage as before."""
        return self.sums is None and self.place.is_of(self.param)

    def is_compared(self, *, on_device: bool) -> bool:
        """Returns whether its bits are compared. Those of a DTensor always are, since operations on lists of DTensors
        (torch._foreach_mul_) raise no version. Others, which may be written through ``.data``, always are in host
        memory, and elsewhere if ``on_device``."""
        return self.is_dtensor or (self.readable and (on_device or self.bits.every_step))

    def check_still_fits(self) -> None:
        """Raises where the parameter was converted or resized since the optimizer was made."""
        param, shard = self.param, self.shard
        check_parameter(shard.name, param)
        device = local_of(param).device
        if device != self.device:
            raise StateError(
                f"{shard.name}: was on {self.device}, now on {device}; make the optimizer after moving the model"
            )
        numel = self.holding.part(param).numel()
        if param.dtype != shard.published_dtype or numel != shard.numel:
            raise StateError(
                f"{shard.name}: was {shard.numel} elements of {shard.published_dtype}, now {numel} of "
                f"{param.dtype}; make a new optimizer after converting or resizing a model"
            )

        if not self.is_dtensor and memory_order(param) != self.holding.order:
            raise StateError(
                f"{shard.name}: its elements are in another order in memory now, strides {param.stride()}; call "
                "model.to(memory_format=...) and the like before the optimizer is made"
            )

    def refresh_master(self) -> None:
        """Copies the written parameter to its master; elements that still are round(master) keep their master."""
        follow(self.shard, self.holding.part(self.param))
        self.remember_value()

    def set_steps(self, steps: int) -> None:
        """Sets the number of steps, which is shown already."""
        self.shown_steps = steps
        self.shard.set_steps(steps)

    def take_over(self, before: TrackedParam) -> None:
        """Takes over what an earlier record of the same parameter has counted."""
        self.shown_steps, self.has_stepped = self.shard.steps, before.has_stepped
        self.steps.look_again(self.number)

    def load(self, values: ParamState | None) -> None:
        """Loads state from a checkpoint; None: the state before the first step."""
        shard, published = self.shard, self.holding.part(self.param)
        self.set_steps(values.step if values else 0)
        self.step.fill_(float(shard.steps))
        if values is None:
            shard.exp_avg.zero_()
            shard.exp_avg_sq.zero_()
            shard.write_masters(published.to(torch.float32))
        else:
            write_moment(shard.exp_avg, shard.numel, EXP_AVG, values.exp_avg.read())
            write_moment(shard.exp_avg_sq, shard.numel, EXP_AVG_SQ, values.exp_avg_sq.read())
            if values.master is None:
                shard.write_masters(published.to(torch.float32))
            else:
                for at, block in values.master.read():
                    shard.write_masters(block, at)
        self.forget_value()  # the next step compares the master with the parameter


def end_step(several: Sequence[TrackedParam]) -> set[TrackedParam]:
    """The engine has none of their gradients any more. Returns those that the step has moved."""
    end_all(tracked.gradient for tracked in several)
    return {tracked for tracked in several if tracked.has_moved()}


def remember_plain(several: Iterable[tuple[TrackedParam, int, Sums]]) -> None:
    """``TrackedParam.remember_plain()`` for each, with its address and sums."""
    for tracked, address, sums in several:
        tracked.remember_plain(address, sums)


def remember_values(several: Iterable[TrackedParam], *, on_device: bool = True) -> None:
    """Remembers the values of these parameters, all of one optimizer, as ours; ``find_edits`` finds later writes.

    ``on_device`` includes the bits of parameters outside of host memory. Where a device has no room for their sums,
    their values count as unknown, and the next step reads them all: that is right, and slower.
    """
    all_of_them = list(several)
    compared = [tracked for tracked in all_of_them if tracked.is_compared(on_device=on_device)]
    sums: dict[TrackedParam, Sums] = {}
    unknown: list[TrackedParam] = []
    if compared:
        flats = [tracked.holding.part(tracked.param) for tracked in compared]
        try:
            sums.update(zip(compared, compared[0].bits.of(flats), strict=True))
        except DeviceError:  # the step is done and must not fail now
            unknown = compared
    for tracked in all_of_them:
        tracked.remember(sums.get(tracked))
    for tracked in unknown:
        tracked.forget_value()


@dataclass(frozen=True)
class FoundEdits:
    """Holds the parameters whose value, or whose kept gradient, was edited since it was remembered.

    ``unversioned``: those of ``written`` whose version counter should have shown the write and did not.
    """

    written: frozenset[TrackedParam]
    edited: frozenset[TrackedParam]
    unversioned: frozenset[TrackedParam]


def find_edits(several: Iterable[TrackedParam], packed_sums: PackedSums = lambda shard: None) -> FoundEdits:
    """Finds edits of parameters of one optimizer, by versions and storage; where those do not show every edit, by bits,
    which are compared all together."""
    written: set[TrackedParam] = set()
    edited: set[TrackedParam] = set()
    compared: list[
        tuple[set[TrackedParam], TrackedParam]
    ] = []  # each with the set to add it to if its bits have changed
    before: list[Sums] = []
    now: list[Tensor] = []
    for tracked in several:
        if tracked.plainly_written:
            written.add(tracked)
        elif tracked.sums is not None:
            compared.append((written, tracked))
            before.append(tracked.sums)
            now.append(tracked.holding.part(tracked.param))
        if not tracked.gradient.plainly_changed:
            for sums, flat in tracked.gradient.summed(packed_sums):
                compared.append((edited, tracked))
                before.append(sums)
                now.append(flat)
    plainly = frozenset(written)
    if compared:
        changed = compared[0][1].bits.changed(before, now)
        for (found, tracked), differs in zip(compared, changed, strict=True):
            if differs:
                found.add(tracked)
    unversioned = frozenset(tracked for tracked in written - plainly if not tracked.is_dtensor)
    return FoundEdits(frozenset(written), frozenset(edited), unversioned)
