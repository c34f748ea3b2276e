"""A parameter and its gradient are watched: masters follow edits of its value, and an edited gradient is packed again.

Each has versions, addresses and, in host memory, bits to compare. Most were not edited, so one pass over all of them
finds those that may have been, for a closer look.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from superoffload import _native
from superoffload.distributed.ownership import Holding
from superoffload.engine.bucket import Piece, Shard
from superoffload.engine.moments import EXP_AVG, EXP_AVG_SQ, write_moment
from superoffload.errors import DeviceError, StateError
from superoffload.host.bits import BitSums, Sums
from superoffload.host.tensors import is_dtensor, local_of, memory_order, version_of
from superoffload.optimizer.arguments import check_parameter
from superoffload.optimizer.gradient_source import gradient_of
from superoffload.optimizer.placeholder import GradientPlaceholder, packed_in, stand_in_for
from superoffload.optimizer.state_dict import ParamState, ShownSteps

UNKNOWN = (-1, -1)

# Returns the sums of the packed bits of a shard's gradient, piece by piece; None where there are none.
PackedSums = Callable[[Shard], list[tuple[Piece, Sums]] | None]


# ---- one gradient that was handed over ------------------------------------------------------------------------------


class TrackedGradient:
    """Remembers the gradient of one parameter that the engine has, and notices edits of it."""

    __slots__ = (  # there is one per parameter, and every step looks at all of them
        "_bits", "_holding", "_param", "_placeholder", "_shard", "_version", "backwards", "expected", "handed",
        "reduced", "sums", "version",
    )  # fmt: skip

    def __init__(self, param: Tensor, shard: Shard, holding: Holding, bits: BitSums) -> None:
        self._param = param
        self._shard = shard
        self._holding = holding
        self._bits = bits
        self._version = UNKNOWN
        self.version = UNKNOWN[0]  # of an ordinary tensor, when it was handed over
        self._placeholder: ReferenceType[GradientPlaceholder] | None = None  # of the gradient that was packed last
        self.handed: Tensor | None = None  # to the engine, in this step
        self.sums: Sums | None = None  # of its bits, if versions do not show every edit and packing makes no sums
        self.reduced: Tensor | None = None  # a reduction's result that the engine has; p.grad must get the same bits
        self.backwards = 0  # that have reached it since the last step
        self.expected = 1  # as many as in the step before

    # ---- handed over ----------------------------------------------------------------------------------------------

    def remember(self, grad: Tensor, *, summed: bool = False) -> None:
        """Remembers the gradient, with the sums of its bits if ``summed``: versions do not show every edit of it."""
        self.handed, self._version, self.version = grad, version_of(grad), grad._version
        self.sums = self._bits.of([self._holding.part_of_gradient(grad)])[0] if summed else None

    def remember_plain(self, grad: Tensor) -> None:
        """Remembers an ordinary tensor, whose version shows every edit."""
        self.handed, self.sums, self._placeholder = grad, None, None
        self.version = grad._version
        self._version = (self.version, 0)

    @property
    def is_asleep(self) -> bool:
        """Returns whether a placeholder stands for the gradient, and no operation has used it since."""
        return isinstance(self.handed, GradientPlaceholder) and self.handed.is_untouched

    def forget(self) -> None:
        """Notes that the engine has no gradient any more."""
        self.handed = None

    def end_step(self) -> None:
        self.handed = self.reduced = None
        self.backwards = 0

    # ---- reduced over ranks -----------------------------------------------------------------------------------------

    def remember_reduced(self, gradient: Tensor) -> None:
        """Remembers the result of a reduction; ``p.grad`` must get the same bits."""
        self.reduced = gradient

    def forget_reduced(self) -> None:
        self.reduced = None

    # ---- edited -----------------------------------------------------------------------------------------------------

    @property
    def plainly_changed(self) -> bool:
        """Returns whether the gradient was edited, as far as that shows without its bits.

        Versions of DTensors show nothing: operations on lists of them raise none, and where FSDP2 accumulates gradients
        it raises those of all parameters that it reduces together, which share a buffer and its counter.
        """
        if gradient_of(self._param) is not self.handed:
            return True
        packed = packed_in(self.handed)
        if packed is not None:  # the bits of one that was brought back are compared elsewhere
            return packed.zeroed or packed.addend is not None
        return self.handed is not None and not is_dtensor(self.handed) and self.was_written(self.handed)

    def was_written(self, grad: Tensor) -> bool:
        """Returns whether the version of ``grad`` differs from the remembered one."""
        return version_of(grad) != self._version

    def summed(self, packed_sums: PackedSums) -> Iterator[tuple[Sums, Tensor]]:
        """Yields sums of the bits of the gradient that was handed over, each with the flat tensor to compare now."""
        if self.handed is None or (self.sums is None and not self._shard.sums_gradient):
            return
        flat = self._holding.part_of_gradient(self.handed)
        if self.sums is not None:
            yield self.sums, flat
            return
        for piece, sums in packed_sums(self._shard) or ():
            yield sums, piece.of(flat.to(self._shard.gradient_dtype))

    # ---- packed and freed -------------------------------------------------------------------------------------------

    @property
    def placeholder(self) -> GradientPlaceholder | None:
        """Returns the placeholder of the gradient that was packed last, while ``p.grad`` or the user keeps it."""
        return None if self._placeholder is None else self._placeholder()

    def is_placeholder(self, packed: GradientPlaceholder) -> bool:
        """Returns whether ``packed`` stands for the gradient that was handed over in this step."""
        return self.handed is packed and self.placeholder is packed

    def forget_placeholder(self) -> None:
        """Forgets the placeholder, because the memory of its packed gradient is reused."""
        self._placeholder = None

    def free(
        self, fetch: Callable[[GradientPlaceholder], None], offer: Callable[[GradientPlaceholder, Tensor], None]
    ) -> None:
        """Frees the packed gradient's memory and puts a placeholder that can ``fetch`` it into ``p.grad``."""
        param = self._param
        local = local_of(param) if is_dtensor(param) else param
        assert self.handed is not None
        packed = GradientPlaceholder(self._shard.name, self._shard.index, local, self.handed.dtype, fetch, offer)
        self._placeholder = ref(packed)
        param.grad = self.handed = stand_in_for(param, packed)
        self._version, self.sums = UNKNOWN, None

    def brought_back(self) -> None:
        """Takes sums of a gradient that was brought back, which also show edits that raise no version: those by C++ or
        through ``.data``."""
        if self.handed is not None and packed_in(self.handed) is self.placeholder:
            self._version = version_of(self.handed)
            self.sums = self._bits.of([self._holding.part_of_gradient(self.handed)])[0]


def end_all(several: Iterable[TrackedGradient]) -> None:
    """The step is over, for each."""
    for gradient in several:
        gradient.end_step()


# ---- one parameter --------------------------------------------------------------------------------------------------


class Location:
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
    readable: bool = True  # a read finds the bits that were published last
    version: tuple[int, int] = UNKNOWN
    sums: Sums | None = None  # of its bits, if they are compared
    shown_steps: int = 0
    was_moved: bool = False  # to another storage, since ``Params.check_apart()``
    has_stepped: bool = False  # by this optimizer, so that the dtype of its gradients is known
    step: Tensor = field(init=False)  # shown as state[p]["step"]
    device: torch.device = field(init=False)  # where it must stay
    place: Location = field(init=False)
    address: int = field(init=False)
    is_dtensor: bool = field(init=False)
    is_plain: bool = field(init=False)  # an ordinary tensor, in the order of its dimensions, all of it here
    gradient: TrackedGradient = field(init=False)

    def __post_init__(self) -> None:
        local = local_of(self.param)
        self.step = self.steps.at(self.number)
        self.device = local.device
        self.place = Location(local)
        self.address = local.data_ptr()
        self.is_dtensor = is_dtensor(self.param)
        self.is_plain = self.readable and self.holding.is_memory_of(self.param)
        self.gradient = TrackedGradient(self.param, self.shard, self.holding, self.bits)

    # ---- the step -------------------------------------------------------------------------------------------------

    def notice_step(self) -> bool:
        """Returns whether the step that ends has moved it, and counts it as shown."""
        moved = self.shown_steps != self.shard.steps
        if moved:
            self.shown_steps = self.shard.steps
            self.has_stepped = True
        return moved

    # ---- the value ------------------------------------------------------------------------------------------------

    def remember_value(self) -> None:
        remember_values([self])

    def remember(self, sums: Sums | None) -> None:
        """Remembers the value as ours, with these sums; None: its bits are not compared until the next call."""
        self.version, self.sums = version_of(self.param), sums
        local = local_of(self.param)
        if not self.place.is_of(local):
            self._move_to(local)

    def _move_to(self, local: Tensor) -> None:
        self.place, self.address, self.was_moved = Location(local), local.data_ptr(), True

    def move_apart(self) -> None:
        """Notes that no other parameter has the same memory."""
        self.was_moved = False

    def remember_plain(self, address: int, sums: Sums) -> None:
        """Remembers the value of an ordinary parameter in host memory, which is at ``address``."""
        self.version, self.sums = (self.param._version, 0), sums
        if address != self.address:
            self._move_to(self.param)

    def mark_outdated(self) -> None:
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
        self.shard.follow(self.holding.part(self.param))
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


# ---- many at once ---------------------------------------------------------------------------------------------------


def end_step(several: Sequence[TrackedParam]) -> set[TrackedParam]:
    """The engine has none of their gradients any more, and the next step is likely to be like this one. Returns those
    that the step has moved."""
    moved = set()
    for tracked in several:
        gradient = tracked.gradient
        gradient.expected = gradient.backwards or 1
        gradient.end_step()
        if tracked.notice_step():
            moved.add(tracked)
    return moved


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


# ---- ordinary tensors, in one pass ----------------------------------------------------------------------------------
# An ordinary tensor is in the order of its dimensions, this rank has it in full, and its gradient is such a tensor
# too. A pass costs about a microsecond each: it compares versions and addresses, and all bits in host memory at once.


def ready_gradients(
    several: Sequence[TrackedParam], arrived: Container[int]
) -> tuple[list[tuple[Shard, Tensor]], list[TrackedParam]]:
    """Finds and remembers gradients that can be packed as they are; returns them, and those that need a closer look.

    ``arrived``: shards, by index, whose gradients the engine has.
    """
    ready: list[tuple[Shard, Tensor]] = []
    others: list[TrackedParam] = []
    bits_compared = bool(several) and several[0].bits.every_step
    for tracked in several:
        param, shard = tracked.param, tracked.shard
        grad = param.grad
        if (
            tracked.is_plain
            and type(grad) is Tensor
            and shard.index not in arrived
            and grad.dtype is shard.gradient_dtype
            and grad.layout is torch.strided
            and grad.is_contiguous()
            and not grad.is_neg()
            and grad.numel() == shard.numel
            and grad.data_ptr()  # 0 for torch's zeros without memory
            and not (shard.keeps_gradient or shard.sums_gradient)
            and "main_grad" not in param.__dict__
            and param._version == tracked.version[0]
            and param.data_ptr() == tracked.address
            and (bits_compared or tracked.place.is_of(param))
        ):
            ready.append((shard, grad))
            tracked.gradient.remember_plain(grad)
        else:
            others.append(tracked)
    return ready, others


def unwritten(several: Sequence[TrackedParam]) -> tuple[list[TrackedParam], list[TrackedParam]]:
    """Returns those whose parameters were not written, and those that need a closer look.

    It also compares bits in host memory, since versions do not show every write.
    """
    alike: list[TrackedParam] = []
    others: list[TrackedParam] = []
    runs: list[tuple[int, int]] = []
    bits_compared = bool(several) and several[0].bits.every_step
    for tracked in several:
        param = tracked.param
        if (
            tracked.is_plain
            and param._version == tracked.version[0]
            and param.data_ptr() == tracked.address
            and (tracked.sums is not None if bits_compared else tracked.is_in_its_storage)
            and param.is_contiguous()
            and not param.is_neg()
            and param.numel() == tracked.shard.numel
        ):
            alike.append(tracked)
            runs.append((tracked.address, param.nbytes))
        else:
            others.append(tracked)
    if not (alike and bits_compared):
        return alike, others
    now = _native.bit_sums(runs, torch.get_num_threads())
    others += [tracked for tracked, sums in zip(alike, now, strict=True) if sums != tracked.sums]
    return [tracked for tracked, sums in zip(alike, now, strict=True) if sums == tracked.sums], others


def unedited(several: Iterable[TrackedParam], arrived: Container[int]) -> tuple[list[TrackedParam], list[TrackedParam]]:
    """Returns those whose gradients are still the ones handed over, and those that need a closer look.

    ``arrived``: shards, by index, whose gradients the engine has.
    """
    alike: list[TrackedParam] = []
    others: list[TrackedParam] = []
    for tracked in several:
        param, gradient = tracked.param, tracked.gradient
        handed = gradient.handed
        as_handed = (
            tracked.is_plain
            and param.grad is handed
            and (handed is not None) is (tracked.shard.index in arrived)
            and (
                handed is None or (type(handed) is Tensor and handed._version == gradient.version) or gradient.is_asleep
            )
            and gradient.reduced is None
            and gradient.sums is None
            and not tracked.shard.sums_gradient
            and "main_grad" not in param.__dict__
        )
        (alike if as_handed else others).append(tracked)
    return alike, others


def outdate(several: Iterable[TrackedParam]) -> None:
    """Raises versions, since values will be delivered later: graphs that need the old values must not be used."""
    plain = [tracked for tracked in several if not is_dtensor(tracked.param)]  # graphs hold gathered copies of DTensors
    torch.autograd.graph.increment_version([tracked.param for tracked in plain])
    for tracked in plain:
        tracked.mark_outdated()


def remember(several: Sequence[TrackedParam], *, on_device: bool) -> None:
    """Remembers values as ``remember_values`` does, those of ordinary parameters in host memory all at once."""
    plain: list[TrackedParam] = []
    runs: list[tuple[int, int]] = []
    others: list[TrackedParam] = []
    bits_compared = bool(several) and several[0].bits.every_step
    for tracked in several:
        param = tracked.param
        if tracked.is_plain and bits_compared and param.is_contiguous() and param.numel() == tracked.shard.numel:
            plain.append(tracked)
            runs.append((param.data_ptr(), param.nbytes))
        else:
            others.append(tracked)
    if others:
        remember_values(others, on_device=on_device)
    for tracked, (address, _), sums in zip(plain, runs, _native.bit_sums(runs, torch.get_num_threads()), strict=True):
        tracked.remember_plain(address, sums)
