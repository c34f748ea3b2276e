"""Shards, buckets and the life of a bucket within one step. Knows nothing of autograd, threads or devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from superoffload import _native
from superoffload.errors import StateError
from superoffload.memory import refused

if TYPE_CHECKING:
    from superoffload.placement import ResidentWork

BLOCK: int = _native.BLOCK
ALIGN = 64  # elements: runs start at whole cache lines in every buffer

ELEMENT_TYPES = {
    torch.float32: _native.ElementType.f32,
    torch.bfloat16: _native.ElementType.bf16,
    torch.float16: _native.ElementType.f16,
}


class BucketState(Enum):
    """Where a bucket is in its step; DESIGN's words."""

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


_ENDED = frozenset(
    {
        BucketState.COMMITTED,
        BucketState.REPLAYED,
        BucketState.STEPPED,
        BucketState.SETTLED,
        BucketState.SKIPPED,
        BucketState.ABANDONED,
    }
)
_NEXT = {
    BucketState.FILLING: {BucketState.READY, BucketState.ABANDONED},
    BucketState.READY: {
        BucketState.SPECULATED,
        BucketState.STEPPED,
        BucketState.PUBLISHED,
        BucketState.SKIPPED,
        BucketState.ABANDONED,
        BucketState.FILLING,
    },
    BucketState.SPECULATED: {
        BucketState.COMMITTED,
        BucketState.REPLAYED,
        BucketState.SKIPPED,
        BucketState.ABANDONED,
        BucketState.UNDONE,
    },
    BucketState.UNDONE: {BucketState.FILLING},
    BucketState.PUBLISHED: {BucketState.SETTLED},
    **{state: {BucketState.FILLING} for state in _ENDED},
}


@dataclass(frozen=True)
class GroupHyper:
    """The hyper-parameters of a param group as a bucket freezes them."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    l2: bool = False
    bias_correction: bool = True


@dataclass(eq=False)
class Shard:
    """The part of a parameter that this rank owns, and its state in host memory.

    ``master``: flat float32 tensor of ``numel`` elements; ``exp_avg``, ``exp_avg_sq``: likewise, or bfloat16 with
    stochastic rounding, keyed by ``noise_stream``. ``target`` returns the flat published tensor that delivery writes.
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
    noise_stream: int = 0
    offset: int = 0  # of its first element in the whole parameter, so that the noise does not depend on the sharding
    steps: int = 0
    resident: bool = False  # master and moments are on the accelerator (superoffload/placement.py)
    keeps_gradient: bool = False  # its gradient stays its user's, also where others are freed (``p.main_grad``)
    sums_gradient: bool = False  # its bits are summed as it is packed, because version counters do not show every edit
    block_sums: NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        self.block_sums = np.zeros(-(-self.numel // BLOCK), np.float64)

    def sum_of_squares(self) -> float:
        """Folded from the block sums of the gradient that was packed last."""
        return _native.fold_sums(self.block_sums.ctypes.data, len(self.block_sums))


@dataclass(frozen=True)
class Piece:
    """A run of one shard inside a bucket; ``start`` and ``offset`` in elements of shard and bucket."""

    shard: Shard
    start: int
    numel: int
    offset: int


class Bucket:
    """A flat run of shard elements of one param group: the unit of transfer, step, undo and publish."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        first = pieces[0].shard
        self.pieces = list(pieces)
        self.group = first.group
        self.resident = first.resident
        self.gradient_dtype = first.gradient_dtype
        self.published_dtype = first.published_dtype
        self.numel = sum(piece.numel for piece in pieces)
        self.padded = _aligned(max(piece.offset + piece.numel for piece in pieces))
        self.state = BucketState.FILLING
        self.present = [False] * len(self.pieces)
        self.missing = len(self.pieces)  # pieces whose gradient is not final
        self.squares = 0.0  # of the packed gradient, where they were known in time to decide on speculation
        self.final = True  # nothing will be added to what is packed, as far as that is known
        # Set by the link (staging) and the core (native work) when the bucket is attached:
        self.gradient: Tensor
        self.gradients: list[Tensor] | None = None  # one per piece, where gradients stay where they arrive
        self.shadow: Tensor
        self.work: _native.BucketWork  # of a resident bucket: nothing
        self.resident_work: ResidentWork | None = None
        self.arrival: _native.Completion | None = None  # of the packed gradient in host memory
        self.packed: _native.Completion | None = None  # likewise, also once its step is over
        self.running: _native.Completion | None = None
        self.doing: _native.Operation | None = None  # None while ``running`` is the gradient on its way
        self.delivery: _native.Completion | None = None  # the copy up that is under way
        self.bit_sums: Mapping[Piece, object] = {}  # of the gradient that was packed last (superoffload/link.py)
        # What the last step or speculation froze:
        self.frozen: GroupHyper | None = None
        self.factor = 1.0
        # Journal width of the next speculation, chosen from the last one (superoffload/policy.py):
        self.width = 1
        self.wide_until = 0
        self.hold = 0
        self.overflows = 0

    def move(self, state: BucketState) -> None:
        """Enters ``state``; anything the state machine does not allow raises and changes nothing."""
        if state not in _NEXT[self.state]:
            raise StateError(f"a bucket cannot go from {self.state.value} to {state.value}")
        self.state = state

    @property
    def name(self) -> str:
        """For errors."""
        first, more = self.pieces[0].shard.name, len(self.pieces) - 1
        others = f" and {more} more" if more else ""
        return f"a bucket of {self.numel} parameters ({first}{others})"

    @property
    def ended(self) -> bool:
        return self.state in _ENDED

    def stepped_pieces(self) -> list[Piece]:
        """Those that have a gradient in this step."""
        return [piece for piece, present in zip(self.pieces, self.present, strict=True) if present]

    def renew(self) -> None:
        """Ready for the next step's gradients."""
        if self.state is not BucketState.FILLING:
            self.move(BucketState.FILLING)
        self.present = [False] * len(self.pieces)
        self.missing = len(self.pieces)
        self.squares = 0.0
        self.arrival = None
        self.bit_sums = {}

    def make_work(self, journal_bytes: int, *, past_cache: bool = False) -> None:
        """The native description; ``gradient`` and ``shadow`` must be allocated (``padded`` elements each).

        ``past_cache``: a step over all buckets exceeds the caches (superoffload/memory.py).
        """
        runs = []
        size = self.gradient_dtype.itemsize
        for i, piece in enumerate(self.pieces):
            shard = piece.shard
            if self.gradients is None:
                gradient = self.gradient.data_ptr() + size * piece.offset
            else:
                gradient = self.gradients[i].data_ptr()
            runs.append(
                _native.Run(
                    master=shard.master.data_ptr() + 4 * piece.start,
                    exp_avg=shard.exp_avg.data_ptr() + shard.exp_avg.element_size() * piece.start,
                    exp_avg_sq=shard.exp_avg_sq.data_ptr() + shard.exp_avg_sq.element_size() * piece.start,
                    gradient=gradient,
                    shadow=self.shadow.data_ptr() + self.shadow.element_size() * piece.offset,
                    numel=piece.numel,
                    gradient_type=ELEMENT_TYPES[self.gradient_dtype],
                    shadow_type=ELEMENT_TYPES[self.published_dtype],
                    state_type=ELEMENT_TYPES[shard.exp_avg.dtype],
                    first_index=piece.shard.offset + piece.start,
                    noise_stream=shard.noise_stream,
                    past_cache=past_cache,
                )
            )
        try:
            self.work = _native.BucketWork(runs, journal_bytes)
        except MemoryError as error:
            raise refused(journal_bytes, f"the undo journal of {self.name}") from error


def _aligned(numel: int) -> int:
    return -(-numel // ALIGN) * ALIGN


def lay_out(shards: Sequence[Shard], bucket_numel: int) -> list[Bucket]:
    """Buckets of about ``bucket_numel`` elements over ``shards``, which are given in the order of backward.

    A bucket holds shards of one group, one pair of dtypes and one place of their state; a shard larger than a bucket
    is cut at multiples of the norm's block. Buckets come in the order in which backward completes them.
    """
    step = max(BLOCK, bucket_numel // BLOCK * BLOCK)
    open_pieces: dict[tuple[int, torch.dtype, torch.dtype, bool], list[Piece]] = {}
    buckets: list[Bucket] = []
    for shard in shards:
        key = (shard.group, shard.gradient_dtype, shard.published_dtype, shard.resident)
        start = 0
        while start < shard.numel:
            pieces = open_pieces.setdefault(key, [])
            offset = _aligned(pieces[-1].offset + pieces[-1].numel) if pieces else 0
            numel = shard.numel - start
            if pieces and numel > step - offset:  # start a new bucket rather than cut a shard that would fit one
                buckets.append(Bucket(open_pieces.pop(key)))
                continue
            numel = min(numel, step)
            pieces.append(Piece(shard, start, numel, offset))
            start += numel
            if offset + numel >= step:
                buckets.append(Bucket(open_pieces.pop(key)))
    position = {shard.index: i for i, shard in enumerate(shards)}
    buckets.extend(Bucket(pieces) for pieces in open_pieces.values())
    buckets.sort(key=lambda bucket: max(position[piece.shard.index] for piece in bucket.pieces))
    return buckets
