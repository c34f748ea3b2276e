"""A parameter is watched: an edit of its value, which its master must follow, is noticed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from superoffload.distributed.ownership import Holding
from superoffload.engine.bucket import Shard
from superoffload.errors import DeviceError, StateError
from superoffload.host.bits import BitSums, Sums
from superoffload.host.tensors import is_dtensor, local_of, memory_order, version_of
from superoffload.optimizer.arguments import check_parameter
from superoffload.optimizer.masters import follow
from superoffload.optimizer.state_dict import ParamState
from superoffload.optimizer.watched_gradient import UNKNOWN, PackedSums, WatchedGradient, end_all


class Place:
    """Knows where a tensor's elements are: in which storage, from where on, in which order.

    Of the storage it keeps the record alive and not the memory. So memory that is freed is free, and a storage that
    gets the same address after it is another one all the same.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._rest = (tensor.data_ptr(), tensor.stride())

    def is_of(self, tensor: Tensor) -> bool:
        same_storage: bool = tensor.untyped_storage()._cdata == self._storage.cdata
        return same_storage and (tensor.data_ptr(), tensor.stride()) == self._rest


@dataclass(eq=False)
class Tracked:
    """Knows a parameter, its shard, and what was last seen of both value and gradient."""

    param: Tensor
    shard: Shard
    step: Tensor  # what state[p]["step"] shows
    holding: Holding  # which elements of the parameter the shard is
    bits: BitSums  # takes sums of the bits of parameters and gradients; the same for all of an optimizer
    early: bool = True  # the gradient is final when its hook runs (not where something reduces it over ranks later)
    readable: bool = True  # read now, its bits are what was published last
    version: tuple[int, int] = UNKNOWN
    sums: Sums | None = None  # of its bits, where they are compared
    shown_steps: int = 0
    has_stepped: bool = False  # by this optimizer, so that the dtype of its gradients is known

    def __post_init__(self) -> None:
        local = local_of(self.param)
        self.device = local.device  # where it is to stay
        self.place = Place(local)
        self.address = local.data_ptr()
        self.is_plain = self.readable and self.holding.is_memory_of(self.param)
        self.gradient = WatchedGradient(self.param, self.shard, self.holding, self.bits)

    # ---- the step -------------------------------------------------------------------------------------------------

    def has_moved(self) -> bool:
        """Whether the step that ends has moved it."""
        moved = self.shown_steps != self.shard.steps
        if moved:
            self.shown_steps = self.shard.steps
            self.has_stepped = True
        return moved

    # ---- the value ------------------------------------------------------------------------------------------------

    def remember_value(self) -> None:
        remember_values([self])

    def remember(self, sums: Sums | None) -> None:
        """The value is ours, and has these sums (None: is not compared until it is remembered again)."""
        self.version, self.sums = version_of(self.param), sums
        local = local_of(self.param)
        if not self.place.is_of(local):
            self.place = Place(local)
            self.address = local.data_ptr()

    def remember_plain(self, address: int, sums: Sums) -> None:
        """``remember`` for an ordinary parameter in host memory, which is at ``address``."""
        self.version, self.sums = (self.param._version, 0), sums
        if address != self.address:
            self.place, self.address = Place(self.param), address

    def is_outdated(self) -> None:
        """Its version was raised, and its value is to be delivered."""
        self.version = version_of(self.param)

    def forget_value(self) -> None:
        """Whatever the parameter has counts as written by its user."""
        self.version = UNKNOWN

    @property
    def plainly_written(self) -> bool:
        """Whether the parameter was written since we last looked, as far as versions and storage show; at no cost."""
        return version_of(self.param) != self.version or not self.place.is_of(local_of(self.param))

    @property
    def is_in_its_storage(self) -> bool:
        """Whether an ordinary parameter has no other storage than before, and its bits are not to be compared."""
        return self.sums is None and self.place.is_of(self.param)

    def is_compared(self, *, on_device: bool) -> bool:
        """Whether its bits are. A DTensor's always: operations on lists of them (torch._foreach_mul_) raise no version.
        Those of others, which ``.data`` leaves as it is, always in host memory and, if ``on_device``, elsewhere."""
        return is_dtensor(self.param) or (self.readable and (on_device or self.bits.every_step))

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

        if not is_dtensor(param) and memory_order(param) != self.holding.order:
            raise StateError(
                f"{shard.name}: its elements are in another order in memory now, strides {param.stride()}; call "
                "model.to(memory_format=...) and the like before the optimizer is made"
            )

    def refresh_master(self) -> None:
        """Takes over what was written to the parameter; elements that still are round(master) keep their master."""
        follow(self.shard.master, self.holding.part(self.param))
        self.remember_value()

    def load(self, values: ParamState | None) -> None:
        """State from a checkpoint; ``None``: as before the first step."""
        shard, published = self.shard, self.holding.part(self.param)
        self.shown_steps = values.step if values else 0
        shard.has_made(self.shown_steps)
        self.step.fill_(float(shard.steps))
        if values is None:
            shard.exp_avg.zero_()
            shard.exp_avg_sq.zero_()
            shard.master.copy_(published)
        else:
            values.exp_avg.copy_to(shard.exp_avg)
            values.exp_avg_sq.copy_to(shard.exp_avg_sq)
            if values.master is None:
                shard.master.copy_(published)
            else:
                values.master.copy_to(shard.master)
        self.forget_value()  # compare with the parameter at the next opportunity


def end_step(several: Sequence[Tracked]) -> set[Tracked]:
    """The engine has none of their gradients any more. Returns those that the step has moved."""
    end_all(tracked.gradient for tracked in several)
    return {tracked for tracked in several if tracked.has_moved()}


def remember_plain(several: Iterable[tuple[Tracked, int, Sums]]) -> None:
    """``Tracked.remember_plain()`` for each, with its address and sums."""
    for tracked, address, sums in several:
        tracked.remember_plain(address, sums)


def remember_values(several: Iterable[Tracked], *, on_device: bool = True) -> None:
    """What these parameters, all of one optimizer, have now is ours: whatever is there instead when ``notice`` looks
    was written by others.

    ``on_device``: also the bits of parameters outside of host memory. Where a device has no room for their sums, their
    values count as unknown, and the next step reads them all: that is right, and slower.
    """
    all_of_them = list(several)
    compared = [tracked for tracked in all_of_them if tracked.is_compared(on_device=on_device)]
    sums: dict[Tracked, Sums] = {}
    unknown: list[Tracked] = []
    if compared:
        flats = [tracked.holding.part(tracked.param) for tracked in compared]
        try:
            sums.update(zip(compared, compared[0].bits.of(flats), strict=True))
        except DeviceError:  # a step that is done stays done
            unknown = compared
    for tracked in all_of_them:
        tracked.remember(sums.get(tracked))
    for tracked in unknown:
        tracked.forget_value()


@dataclass(frozen=True)
class Noticed:
    """Says whose value, and whose kept gradient, was edited since we last looked.

    ``untold``: those of ``written`` of which no version counter tells that should have.
    """

    written: frozenset[Tracked]
    edited: frozenset[Tracked]
    untold: frozenset[Tracked]


def notice(several: Iterable[Tracked], packed_sums: PackedSums = lambda shard: None) -> Noticed:
    """Of parameters of one optimizer: by versions and storage, and where those do not show everything, by bits, all of
    which are compared together."""
    written: set[Tracked] = set()
    edited: set[Tracked] = set()
    compared: list[tuple[set[Tracked], Tracked]] = []  # where it belongs if its bits have changed
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
    untold = frozenset(tracked for tracked in written - plainly if not is_dtensor(tracked.param))
    return Noticed(frozenset(written), frozenset(edited), untold)
