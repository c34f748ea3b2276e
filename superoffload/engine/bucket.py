"""A bucket groups pieces of shards and goes through the states of one step. Every folder may import this module."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from superoffload import _native
from superoffload.engine.journal import JournalWidth
from superoffload.engine.master_halves import UpperHalves, following, join
from superoffload.errors import StateError

BLOCK: int = _native.BLOCK
# beta ** step is 0 in double precision from here on, so that 1 - beta ** step, the bias correction, is 1.
_CORRECTED_BY_ONE = 1 << 60
ALIGN = 64  # elements: runs start at whole cache lines in every buffer

# Hands an operation on a bucket to worker threads, with the width of its codes, behind a completion if there is one.
Submit: TypeAlias = Callable[
    [_native.BucketWork, _native.Operation, int, _native.Completion | None], _native.Completion
]
# Saves the state of shards, for snapshots that are still read, before it changes.
Protect: TypeAlias = Callable[[Sequence["Shard"]], None]

ELEMENT_TYPES = {
    torch.float32: _native.ElementType.f32,
    torch.bfloat16: _native.ElementType.bf16,
    torch.float16: _native.ElementType.f16,
}


class BucketState(Enum):
    """Says where a bucket is in its step."""

    FILLING = "filling"
    READY = "ready"
    SPECULATED = "speculated"
    UNDONE = "undone"
    COMMITTED = "committed"
    REPLAYED = "replayed"
    STEPPED = "stepped"
    PUBLISHED = "published"
    SETTLED = "settled"
    SKIPPED = "skipped"
    ABANDONED = "abandoned"


_S = BucketState
_ENDED = (_S.COMMITTED, _S.REPLAYED, _S.STEPPED, _S.SETTLED, _S.SKIPPED, _S.ABANDONED)
NEXT = {
    _S.FILLING: {_S.READY, _S.ABANDONED},
    _S.READY: {_S.SPECULATED, _S.STEPPED, _S.PUBLISHED, _S.SKIPPED, _S.ABANDONED, _S.FILLING},
    _S.SPECULATED: {_S.COMMITTED, _S.REPLAYED, _S.SKIPPED, _S.ABANDONED, _S.UNDONE},
    _S.UNDONE: {_S.FILLING},
    _S.PUBLISHED: {_S.SETTLED},
    **{state: {_S.FILLING} for state in _ENDED},
}


@dataclass(frozen=True)
class GroupHyper:
    """Holds the hyper-parameters of a param group as a bucket freezes them."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    l2: bool = False
    bias_correction: bool = True
    maximize: bool = False


@dataclass(eq=False, slots=True)
class Shard:
    """Describes the part of a parameter that this rank owns, and holds its state.

    ``master`` is a flat float32 tensor of ``numel`` elements, or, of a split master, the int16 remainders to ``upper``.
    ``exp_avg`` and ``exp_avg_sq`` are float32, or bfloat16 with stochastic rounding by ``noise_stream``. ``target``
    returns the flat published tensor that delivery writes.
    """

    index: int
    name: str
    group: int
    numel: int
    gradient_dtype: torch.dtype
    published_dtype: torch.dtype
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    target: Callable[[], Tensor]
    parameter: Tensor | None = None  # a plain tensor in host memory that the published shard shares memory with
    noise_stream: int = 0
    # Where it is in the whole parameter, so that the noise does not depend on the sharding: the index of its first
    # element, and the axes along which its elements follow, (length, stride), the innermost first; (): it is one run.
    offset: int = 0
    axes: tuple[tuple[int, int], ...] = ()
    steps: int = 0
    resident: bool = False  # master and moments are on the accelerator (superoffload/engine/placement.py)
    reduced_later: bool = False  # its gradient may be reduced over ranks after its hook has run, so is not final there
    keeps_gradient: bool = False  # its gradient stays with the user even if others are freed (``p.main_grad``)
    sums_gradient: bool = False  # packing also sums the gradient's bits: version counters do not show every edit
    upper: UpperHalves | None = None  # of a split master: what is published of it, before delivery
    apart: bool = False  # its master may have been written since the last step, so is perhaps not what is published
    windows: list[ref[NDArray[np.generic]]] = field(default_factory=list)  # onto its state, which a program may have
    block_sums: NDArray[np.float64] = field(init=False)
    sums_address: int = field(init=False)

    def __post_init__(self) -> None:
        self.block_sums = np.zeros(-(-self.numel // BLOCK), np.float64)
        self.sums_address = self.block_sums.ctypes.data

    def gradient_is_final(self) -> None:
        """Notes, before buckets are laid out for good, that its gradient is not reduced after backward has made it."""
        self.reduced_later = False

    def use_state(self, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, resident: bool) -> None:
        """Puts the same state, in other memory, in the place of the old tensors."""
        self.master, self.exp_avg, self.exp_avg_sq, self.resident = master, exp_avg, exp_avg_sq, resident
        self.windows = []

    def take_over(self, before: Shard) -> None:
        """Takes the state of ``before``, an earlier record of the same elements."""
        self.use_state(before.master, before.exp_avg, before.exp_avg_sq, resident=before.resident)
        self.upper, self.steps, self.windows = before.upper, before.steps, before.windows

    def window(self, flat: Tensor) -> Tensor:
        """Returns a tensor for a program that has the memory of ``flat``, state in host memory, and a storage of its
        own. So ``is_held`` knows whether the program still has it, a view of it, or a NumPy array."""
        if not flat.numel():
            return flat
        words = flat.view(torch.int16 if flat.element_size() == 2 else torch.int32).numpy()
        self.windows, self.apart = [*filter(_is_alive, self.windows), ref(words)], True
        return torch.from_numpy(words).view(flat.dtype)

    @property
    def is_held(self) -> bool:
        """Returns whether a program may read or write the state at any time."""
        return any(map(_is_alive, self.windows))

    def read_masters(self, phase: int = 0, stride: int = 1) -> Tensor:
        """Returns every ``stride``-th master from ``phase`` below ``stride``, in float32; of split masters a copy."""
        part = self.master[phase::stride]
        return part if self.upper is None else join(self.upper.read(phase, stride), part)

    def write_masters(self, values: Tensor, at: int = 0) -> None:
        """Overwrites the masters from ``at`` on by flat float32 ``values``."""
        stored, self.apart = self.master[at : at + values.numel()], True
        if self.upper is None:
            stored.copy_(values)
        else:
            self.upper.write(at, values, remainders=stored)

    def follow(self, published: Tensor) -> None:
        """Has the masters follow the parameter, which was written: flat ``published``."""
        self.write_masters(following(self.read_masters(), published))
        self.apart = False

    def splits_master(self) -> None:
        """Begins with the published values as masters: ``master``, the remainders, must be zero."""
        self.upper = UpperHalves(self.target().detach())
        if self.resident:  # the kernel that steps them writes the parameter, too
            self.upper.gather(self.master.device)

    def gradient_stays(self, *, kept: bool, summed: bool) -> None:
        """Says that the gradient stays with the user (``kept``) and that packing sums its bits (``summed``)."""
        self.keeps_gradient, self.sums_gradient = kept, summed

    def set_steps(self, steps: int) -> None:
        """Sets the number of steps, as a checkpoint has it."""
        self.steps = steps

    @property
    def address(self) -> int:
        """Returns the address of ``parameter`` where its memory is that of the published shard, else 0."""
        param = self.parameter
        if param is None or param.numel() != self.numel or param.dtype != self.published_dtype:
            return 0
        return param.data_ptr() if param.is_contiguous() and param.is_cpu else 0

    def sum_of_squares(self) -> float:
        """Folds the block sums of the gradient that was packed last."""
        return sums_of_squares([self])[0]


def _is_alive(window: ref[NDArray[np.generic]]) -> bool:
    return window() is not None


def sums_of_squares(shards: Sequence[Shard]) -> list[float]:
    """Folds, for each shard, the block sums of the gradient that was packed last."""
    return _native.fold_sums([(shard.sums_address, len(shard.block_sums)) for shard in shards])


@dataclass(frozen=True, slots=True)
class Piece:
    """Describes a run of one shard inside a bucket; ``start`` and ``offset`` count elements of shard and bucket."""

    shard: Shard
    start: int
    numel: int
    offset: int
    sums_address: int = field(init=False)  # of the block sums of its gradient, which are fp64
    sums: tuple[int, int] = field(init=False)  # their address, and how many they are

    def __post_init__(self) -> None:
        object.__setattr__(self, "sums_address", self.shard.sums_address + 8 * (self.start // BLOCK))
        object.__setattr__(self, "sums", (self.sums_address, -(-self.numel // BLOCK)))

    def of(self, flat: Tensor) -> Tensor:
        """Returns its elements of a flat tensor over the shard."""
        return flat[self.start : self.start + self.numel]


class ResidentWork:
    """Holds the kernels' scalars of every piece of a resident bucket, None where it has no gradient.

    ``noise_streams``: of its pieces.
    """

    def __init__(self, noise_streams: Sequence[int]) -> None:
        self._streams = noise_streams
        self.scalars: list[bytes | None] = [None] * len(noise_streams)

    def freeze(
        self,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        gradient_factor: float,
        l2: bool,
        steps: list[int],
    ) -> None:
        """Does what ``BucketWork.freeze`` does; a step number of 0 means that the piece is not stepped."""
        self.scalars = [
            _native.freeze_scalars(lr, beta1, beta2, eps, weight_decay, gradient_factor, l2, step, stream)
            if step
            else None
            for step, stream in zip(steps, self._streams, strict=True)
        ]


class Bucket:
    """Groups shard elements of one param group: the unit of transfer, step, undo and publish."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        first = pieces[0].shard
        self.pieces = list(pieces)
        self.indices = frozenset(piece.shard.index for piece in pieces)  # of its shards
        self.number = 0  # its place in the order of backward
        self.why_not_speculated: str | None = None  # why it was not stepped during backward
        self.waits_for_all = False  # a gradient came after backward had seemed to pass it
        self.group = first.group
        self.resident = first.resident
        self.gradient_dtype = first.gradient_dtype
        self.published_dtype = first.published_dtype
        self.numel = sum(piece.numel for piece in pieces)
        self.padded = aligned(max(piece.offset + piece.numel for piece in pieces))
        self.state = BucketState.FILLING
        self.present = [False] * len(self.pieces)
        self.missing = len(self.pieces)  # pieces whose gradient is not final
        self.final = True  # no addition to the packed gradient is expected
        # The link (memory) and the layout (native work) assign these when they attach the bucket:
        self.gradient: Tensor = torch.empty(0, dtype=self.gradient_dtype, device="cpu")
        self.gradients: Sequence[Tensor | None] | None = None  # one per piece, where gradients stay where they arrive
        self.shadow: Tensor = torch.empty(0, dtype=self.published_dtype, device="cpu")
        self.published: Sequence[Tensor] | None = None  # one per piece, where a step writes them at once
        self.work = _native.BucketWork([], 0)  # empty for a resident bucket, and between steps in place
        self.resident_work: ResidentWork | None = None
        self.arrival: _native.Completion | None = None  # of the packed gradient in host memory
        self.packed: _native.Completion | None = None  # the same, kept after the step is over
        self.running: _native.Completion | None = None
        self.doing: _native.Operation | None = None  # None while ``running`` is the arrival of the gradient
        self.bit_sums: Mapping[Piece, object] = {}  # of the gradient that was packed last (superoffload/links/base.py)
        # What the last step or speculation froze:
        self.frozen: GroupHyper | None = None
        self.factor = 1.0
        self.journal_width = JournalWidth()

    def move(self, state: BucketState) -> None:
        """Enters ``state``; raises and changes nothing where the state machine does not allow that."""
        if state not in NEXT[self.state]:
            raise StateError(f"a bucket cannot go from {self.state.value} to {state.value}")
        self.state = state

    @property
    def name(self) -> str:
        """Names the bucket in errors."""
        first, more = self.pieces[0].shard.name, len(self.pieces) - 1
        others = f" and {more} more" if more else ""
        return f"a bucket of {self.numel} parameters ({first}{others})"

    def stepped_pieces(self) -> list[Piece]:
        """Returns the pieces that have a gradient in this step."""
        return [piece for piece, present in zip(self.pieces, self.present, strict=True) if present]

    def renew(self) -> None:
        """Prepares the bucket for the next step's gradients."""
        if self.state is not BucketState.FILLING:
            self.move(BucketState.FILLING)
        self.present = [False] * len(self.pieces)
        self.missing = len(self.pieces)
        self.arrival = None
        self.bit_sums = {}

    @property
    def splits_masters(self) -> bool:
        """Returns whether any of its masters is split, so that the shadow has the upper halves."""
        return any(piece.shard.upper is not None for piece in self.pieces)

    @property
    def held(self) -> str | None:
        """Returns the name of a shard whose state a program may read or write at any time: so it is not stepped when
        no verdict is known, nor in two phases."""
        return next((piece.shard.name for piece in self.pieces if piece.shard.windows and piece.shard.is_held), None)

    # ---- its gradient -----------------------------------------------------------------------------------------

    def receive(self, places: Iterable[int]) -> None:
        """Notes that the gradients of the pieces at these places have arrived."""
        for place in places:
            self.present[place] = True
            self.missing -= 1

    def take_out(self, place: int) -> None:
        """Notes that the gradient of the piece at ``place`` is missing again."""
        self.present[place] = False
        self.missing += 1

    def leave_out(self, shards: Container[int]) -> None:
        """Keeps the pieces of these shards, given by index, from being delivered."""
        self.present = [
            present and piece.shard.index not in shards
            for piece, present in zip(self.pieces, self.present, strict=True)
        ]

    def mark_packed(self, arrival: _native.Completion, bit_sums: Mapping[Piece, object]) -> None:
        """Notes that the gradient was packed and is in host memory once ``arrival`` is done."""
        self.arrival = self.packed = self.running = arrival
        self.bit_sums = {**self.bit_sums, **bit_sums}
        self.move(BucketState.READY)

    # ---- work on it -------------------------------------------------------------------------------------------

    def run(self, operation: _native.Operation, submit: Submit, width: int = 1) -> None:
        """Worker threads get ``operation``, behind what runs on the bucket, if that is its gradient on the way."""
        self.running, self.doing = submit(self.work, operation, width, self.running), operation

    def speculate(
        self, hyper_of: Callable[[int], GroupHyper], factor: float, submit: Submit, protect: Protect | None
    ) -> str | None:
        """Has worker threads step it with a journal, and returns None; else why they cannot."""
        if self.held is not None:
            return f"the program holds state of {self.held}"
        width = self.journal_width.choose(self.work, self.next_step())
        if width is None:
            return "its journal has no room or overflowed lately"
        if protect is not None:
            protect([piece.shard for piece in self.pieces])
        self.freeze(hyper_of(self.group), factor)
        self.run(_native.Operation.step_journaled, submit, width)
        self.move(BucketState.SPECULATED)
        return None

    def freeze(self, hyper: GroupHyper, factor: float) -> None:
        """Fixes the scalars that the bucket is stepped with and that an undo needs."""
        ahead = 1 if hyper.bias_correction else _CORRECTED_BY_ONE
        work = self.work if self.resident_work is None else self.resident_work
        work.freeze(
            lr=hyper.lr,
            beta1=hyper.beta1,
            beta2=hyper.beta2,
            eps=hyper.eps,
            weight_decay=hyper.weight_decay,
            gradient_factor=-factor if hyper.maximize else factor,
            l2=hyper.l2,
            steps=[
                piece.shard.steps + ahead if present else 0
                for piece, present in zip(self.pieces, self.present, strict=True)
            ],
        )
        self.frozen, self.factor = hyper, factor

    def next_step(self) -> int:
        """Returns the number of the next step of the piece with a gradient that has made the fewest steps."""
        return 1 + min([piece.shard.steps for piece in self.stepped_pieces()])

    # ---- its memory -------------------------------------------------------------------------------------------

    def take_halves(self) -> None:
        """Moves the upper halves of split masters into the shadow."""
        for piece in self.pieces:
            if piece.shard.upper is not None:
                piece.shard.upper.move_in(piece.start, self.shadow[piece.offset : piece.offset + piece.numel])

    def publish_restored(self) -> None:
        """Where a step has written parameters, publishes the masters that its undo has restored, whose rounded values
        these parameters were before (``Shard.apart``)."""
        for piece, target, present in zip(self.pieces, self.published or (), self.present, strict=False):
            if present:
                target.copy_(piece.of(piece.shard.master))

    def use_memory(
        self,
        *,
        gradient: Tensor | None = None,
        gradients: Sequence[Tensor | None] | None = None,
        shadow: Tensor | None = None,
        published: Sequence[Tensor] | None = None,
    ) -> None:
        """Uses these flat tensors of ``padded`` elements; ``gradients`` and ``published``, one per piece, replace
        ``gradient`` and ``shadow``."""
        if gradient is not None:
            self.gradient = gradient
        if gradients is not None:
            self.gradients = gradients
        if shadow is not None:
            self.shadow = shadow
        if published is not None:
            self.published = published

    def let_go(self) -> None:
        """Forgets the gradients and parameters that are read and written where they are, of the step that has ended."""
        self.gradients = self.published = None
        self.work = _native.BucketWork([], 0)

    def make_resident_work(self) -> None:
        """Makes the work of a bucket whose state is on the accelerator: none for worker threads."""
        self.work = _native.BucketWork([], 0)
        self.resident_work = ResidentWork([piece.shard.noise_stream for piece in self.pieces])


def aligned(numel: int) -> int:
    """Rounds ``numel`` up to a multiple of ``ALIGN``."""
    return -(-numel // ALIGN) * ALIGN
