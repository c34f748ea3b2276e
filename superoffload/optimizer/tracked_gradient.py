"""A gradient that was handed over is watched, so that it is packed again after an edit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from weakref import ReferenceType, ref

from torch import Tensor

from superoffload.distributed.ownership import Holding
from superoffload.engine.bucket import Piece, Shard
from superoffload.host.bits import BitSums, Sums
from superoffload.host.tensors import is_dtensor, local_of, version_of
from superoffload.optimizer.gradient_source import gradient_of
from superoffload.optimizer.packed_gradient import PackedGradient, packed_in, stand_in_for

UNKNOWN = (-1, -1)

# Returns the sums of the packed bits of a shard's gradient, piece by piece; None where there are none.
PackedSums = Callable[[Shard], list[tuple[Piece, Sums]] | None]


class TrackedGradient:
    """Remembers the gradient of one parameter that the engine has, and notices edits of it."""

    __slots__ = (  # there is one per parameter, and every step looks at all of them
        "_bits", "_holding", "_param", "_placeholder", "_shard", "_version", "handed", "reduced", "sums", "version",
    )  # fmt: skip

    def __init__(self, param: Tensor, shard: Shard, holding: Holding, bits: BitSums) -> None:
        self._param = param
        self._shard = shard
        self._holding = holding
        self._bits = bits
        self._version = UNKNOWN
        self.version = UNKNOWN[0]  # of an ordinary tensor, when it was handed over
        self._placeholder: ReferenceType[PackedGradient] | None = None  # of the gradient that was packed last
        self.handed: Tensor | None = None  # to the engine, in this step
        self.sums: Sums | None = None  # of its bits, if versions do not show every edit and packing makes no sums
        self.reduced: Tensor | None = None  # a reduction's result that the engine has; p.grad must get the same bits

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
        return isinstance(self.handed, PackedGradient) and self.handed.is_untouched

    def forget(self) -> None:
        """Notes that the engine has no gradient any more."""
        self.handed = None

    def end_step(self) -> None:
        self.handed = self.reduced = None

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
            yield sums, flat.to(self._shard.gradient_dtype)[piece.start : piece.start + piece.numel]

    # ---- packed and freed -------------------------------------------------------------------------------------------

    @property
    def placeholder(self) -> PackedGradient | None:
        """Returns the placeholder of the gradient that was packed last, while ``p.grad`` or the user keeps it."""
        return None if self._placeholder is None else self._placeholder()

    def is_placeholder(self, packed: PackedGradient) -> bool:
        """Returns whether ``packed`` stands for the gradient that was handed over in this step."""
        return self.handed is packed and self.placeholder is packed

    def forget_placeholder(self) -> None:
        """Forgets the placeholder, because the memory of its packed gradient is reused."""
        self._placeholder = None

    def free(self, fetch: Callable[[PackedGradient], None], offer: Callable[[PackedGradient, Tensor], None]) -> None:
        """Frees the packed gradient's memory and puts a placeholder that can ``fetch`` it into ``p.grad``."""
        param = self._param
        local = local_of(param) if is_dtensor(param) else param
        assert self.handed is not None
        packed = PackedGradient(self._shard.name, self._shard.index, local, self.handed.dtype, fetch, offer)
        self._placeholder = ref(packed)
        param.grad = self.handed = stand_in_for(param, packed)
        self._version, self.sums = UNKNOWN, None

    def brought_back(self) -> None:
        """Takes sums of a gradient that was brought back, which also show edits that raise no version: those by C++ or
        through ``.data``."""
        if self.handed is not None and packed_in(self.handed) is self.placeholder:
            self._version = version_of(self.handed)
            self.sums = self._bits.of([self._holding.part_of_gradient(self.handed)])[0]


def remember_all(several: Iterable[tuple[TrackedGradient, Tensor]]) -> None:
    """Calls ``remember_plain()`` for each pair."""
    for gradient, grad in several:
        gradient.remember_plain(grad)


def end_all(several: Iterable[TrackedGradient]) -> None:
    """The step is over, for each."""
    for gradient in several:
        gradient.end_step()
