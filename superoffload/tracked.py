"""What is known of one parameter: its shard, and the user-visible versions of value and gradient we acted on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle

from superoffload.arguments import check_parameter
from superoffload.bits import BitSums, Sums
from superoffload.bucket import Piece, Shard
from superoffload.checkpoint import ParamState
from superoffload.errors import DeviceError, StateError
from superoffload.gradient_source import gradient_of
from superoffload.masters import follow
from superoffload.packed_gradient import PackedGradient, packed_in, stand_in_for
from superoffload.ranks.layout import Holding, is_dtensor, local_of, memory_order, version_of

UNKNOWN = (-1, -1)

# Sums of the bits of a shard's gradient as it was packed, piece by piece; None where there are none.
PackedSums = Callable[[Shard], list[tuple[Piece, Sums]] | None]


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
    """A parameter, its shard, and what we last saw of both value and gradient."""

    param: Tensor
    shard: Shard
    step: Tensor  # what state[p]["step"] shows
    holding: Holding  # which elements of the parameter the shard is
    bits: BitSums  # takes sums of the bits of parameters and gradients; the same for all of an optimizer
    early: bool = True  # the gradient is final when its hook runs (not where somebody reduces it over ranks later)
    readable: bool = True  # read now, its bits are what was published last
    version: tuple[int, int] = UNKNOWN
    sums: Sums | None = None  # of its bits, where they are compared
    grad: Tensor | None = None  # the gradient that was handed to the core in this step
    grad_version: tuple[int, int] = UNKNOWN
    grad_sums: Sums | None = None  # of its bits, where versions do not show every edit and packing it gives none
    reduced: Tensor | None = None  # what a reduction gave and the core has; p.grad must turn out to be the same
    _packed: ReferenceType[PackedGradient] | None = None  # the placeholder of the gradient that was packed last
    arrivals: int = 0  # backward passes that reached it since the last step
    expected: int = 1  # as many as in the step before
    shown_steps: int = 0
    has_stepped: bool = False  # by this optimizer, so that the dtype of its gradients is known
    hook: RemovableHandle | None = None  # None while it is frozen

    def __post_init__(self) -> None:
        local = local_of(self.param)
        self._device = local.device
        self._place = Place(local)

    def remember_value(self) -> None:
        remember_values([self])

    def remember(self, sums: Sums | None) -> None:
        """The value is ours, and has these sums (None: is not compared until it is remembered again)."""
        self.version, self.sums = version_of(self.param), sums
        local = local_of(self.param)
        if not self._place.is_of(local):
            self._place = Place(local)

    def outdate(self) -> None:
        """A new value is to be delivered later: graphs that still need the old one must not be used any more."""
        if not is_dtensor(self.param):  # of a DTensor, graphs hold what was gathered of it
            torch.autograd.graph.increment_version(self.param)
            self.version = version_of(self.param)

    def forget_value(self) -> None:
        """Whatever the parameter has counts as written by somebody else."""
        self.version = UNKNOWN

    @property
    def plainly_written(self) -> bool:
        """Whether the parameter was written since we last looked, as far as versions and storage show; at no cost."""
        return version_of(self.param) != self.version or not self._place.is_of(local_of(self.param))

    def is_compared(self, *, on_device: bool) -> bool:
        """Whether its bits are. A DTensor's always: operations on lists of them (torch._foreach_mul_) raise no version.
        Those of others, which ``.data`` leaves as it is, always in host memory and, if ``on_device``, elsewhere."""
        return is_dtensor(self.param) or (self.readable and (on_device or self.bits.every_step))

    @property
    def grad_changed(self) -> bool:
        """As far as it shows without a look at bits.

        Versions of DTensors show nothing: an operation on lists of them raises none, and FSDP2, where it accumulates
        gradients, raises those of all parameters that it reduces together, which share one buffer and its counter.
        """
        if gradient_of(self.param) is not self.grad:
            return True
        packed = packed_in(self.grad)
        if packed is not None:  # one that was brought back is compared
            return packed.zeroed or packed.addend is not None
        return self.grad is not None and not is_dtensor(self.grad) and version_of(self.grad) != self.grad_version

    def remember_grad(self, grad: Tensor, *, summed: bool = False) -> None:
        """``summed``: versions do not show every edit, and comparing its bits with the core's would take a copy."""
        self.grad, self.grad_version = grad, version_of(grad)
        self.grad_sums = self.bits.of([self.holding.part(grad).contiguous()])[0] if summed else None

    def summed_gradient(self, packed_sums: PackedSums) -> Iterator[tuple[Sums, Tensor]]:
        """Sums of the bits of the gradient that was handed over, and what they are to be compared with now."""
        if self.grad is None or (self.grad_sums is None and not self.shard.sums_gradient):
            return
        flat = self.holding.part(self.grad).contiguous()
        if self.grad_sums is not None:
            yield self.grad_sums, flat
            return
        for piece, sums in packed_sums(self.shard) or ():
            yield sums, flat.to(self.shard.gradient_dtype)[piece.start : piece.start + piece.numel]

    @property
    def packed(self) -> PackedGradient | None:
        """The placeholder of the gradient that was packed last, as long as ``p.grad`` or the user has it."""
        return None if self._packed is None else self._packed()

    def forget_packed(self) -> None:
        """The place where that gradient was packed is needed."""
        self._packed = None

    def free_grad(
        self, fetch: Callable[[PackedGradient], None], offer: Callable[[PackedGradient, Tensor], None]
    ) -> None:
        """The gradient was packed: its memory goes, and a placeholder that can ``fetch`` it stands in ``p.grad``."""
        local = local_of(self.param) if is_dtensor(self.param) else self.param
        assert self.grad is not None
        packed = PackedGradient(self.shard.name, self.shard.index, local, self.grad.dtype, fetch, offer)
        self._packed = ref(packed)
        self.param.grad = self.grad = stand_in_for(self.param, packed)
        self.grad_version, self.grad_sums = UNKNOWN, None

    def brought_back(self) -> None:
        """The placeholder has its gradient again. What is done to that shows in its sums, also what raises no version:
        what comes through C++ or ``.data``."""
        if self.grad is not None and packed_in(self.grad) is self.packed:
            self.grad_version = version_of(self.grad)
            self.grad_sums = self.bits.of([self.holding.part(self.grad)])[0]

    def check_still_fits(self) -> None:
        """Raises where the parameter was converted or resized since the optimizer was made."""
        param, shard = self.param, self.shard
        check_parameter(shard.name, param)
        device = local_of(param).device
        if device != self._device:
            raise StateError(
                f"{shard.name}: was on {self._device}, now on {device}; make the optimizer after moving the model"
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
        """Takes over what somebody wrote to the parameter; elements that still are round(master) keep their master."""
        follow(self.shard.master, self.holding.part(self.param))
        self.remember_value()

    def load(self, values: ParamState | None) -> None:
        """State from a checkpoint; ``None``: as before the first step."""
        shard, published = self.shard, self.holding.part(self.param)
        shard.steps = self.shown_steps = values.step if values else 0
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
    """Whose value, and whose kept gradient, was edited since we last looked.

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
        if not tracked.grad_changed:
            for sums, flat in tracked.summed_gradient(packed_sums):
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
