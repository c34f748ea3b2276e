"""A split master is kept in two halves of 16 bits: the bf16 value that is published, and the remainder.

With the fp32 master's bits as an unsigned number, the upper half is (bits + 0x8000) >> 16: rounded to nearest, ties
away from zero. The remainder is the signed lower half. Both together have the bits of the master (docs/kernel.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from superoffload.host.bits import WORD
from superoffload.host.memory import host_empty

_AT_ONCE = 1 << 17  # masters to split at a time, so that a load needs little memory beside them


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the upper halves (bfloat16) and the remainders (int16) of flat float32 ``values``; NaN has one pattern.

    Both are views of every second half-word of new memory.
    """
    bits = torch.where(values.isnan(), torch.nan, values).contiguous().view(torch.int32)
    return (bits + 0x8000).view(torch.bfloat16)[1::2], bits.view(torch.int16)[::2]


def join(upper: Tensor, remainders: Tensor) -> Tensor:
    """Returns float32 masters on the device of ``remainders``, from the bfloat16 upper halves."""
    words = upper.to(remainders.device).view(torch.int16).to(torch.int32)
    return words.bitwise_left_shift_(16).add_(remainders).view(torch.float32)


def is_rounded(published: Tensor, values: Tensor) -> Tensor:
    """Tells, element by element, whether ``published`` is round(``values``), by bits. At a tie both neighbours are: a
    whole master publishes the even one, a split master the one away from zero. A NaN only equals the same NaN."""
    word = WORD[published.dtype]
    same = published.view(word) == values.to(published.dtype).view(word)
    if published.dtype == torch.bfloat16 and not bool(same.all()):
        same |= published.view(word) == split(values)[0].contiguous().view(word)
    return same


def following(masters: Tensor, published: Tensor) -> Tensor:
    """Returns flat ``published`` in float32; elements that still are round(master) keep the bits of flat ``masters``.

    It compares bits, since the user may have written the other zero, or a NaN.
    """
    published = published.to(masters.device)
    return torch.where(is_rounded(published, masters), masters, published.to(torch.float32))


@dataclass(frozen=True)
class _Part:
    """Describes a run of upper halves; ``first`` is the index of its first element."""

    first: int
    memory: Tensor
    lent: bool = False  # it is the parameter's memory: only read it

    @property
    def end(self) -> int:
        return self.first + self.memory.numel()

    def cut(self, first: int, end: int) -> _Part:
        return _Part(first, self.memory[first - self.first : end - self.first], self.lent)


class UpperHalves:
    """Holds the upper halves of a shard's masters, in the shadows of its buckets."""

    def __init__(self, halves: Tensor) -> None:
        """``halves``: flat bfloat16, the parameter. They are read there until they move."""
        self._parts: tuple[_Part, ...] = (_Part(0, halves, lent=True),)  # in order

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Returns the flat tensors that make up the shard, in order."""
        return tuple(part.memory for part in self._parts)

    @property
    def numel(self) -> int:
        return self._parts[-1].end

    @property
    def nbytes(self) -> int:
        """Counts the bytes of their memory, without that of the parameter."""
        return sum(part.memory.nbytes for part in self._parts if not part.lent)

    def read(self, phase: int = 0, stride: int = 1) -> Tensor:
        """Returns every ``stride``-th one from ``phase`` below ``stride``, perhaps as a view."""
        read = [part.memory[(phase - part.first) % stride :: stride] for part in self._parts]
        return read[0] if len(read) == 1 else torch.cat(read)

    def write(self, at: int, values: Tensor, *, remainders: Tensor) -> None:
        """Splits flat float32 ``values``, overwrites the halves from ``at`` on, and fills ``remainders``."""
        if any(part.lent for part in self._parts):  # memory for the shadow was refused so far
            self.gather()
        for begin in range(0, values.numel(), _AT_ONCE):
            end = begin + _AT_ONCE
            halves, rest = split(values[begin:end])
            remainders[begin:end].copy_(rest)
            self._overwrite(at + begin, halves)

    def _overwrite(self, at: int, halves: Tensor) -> None:
        end = at + halves.numel()
        for part in self._parts:
            first, last = max(at, part.first), min(end, part.end)
            if first < last:
                part.cut(first, last).memory.copy_(halves[first - at : last - at])

    def move_in(self, start: int, memory: Tensor) -> None:
        """Copies those from ``start`` on to ``memory`` and keeps them there from now on."""
        moved = _Part(start, memory)
        parts = [moved]
        for part in self._parts:
            first, last = max(part.first, start), min(part.end, moved.end)
            if first < last:
                moved.cut(first, last).memory.copy_(part.cut(first, last).memory)
            if part.first < start:
                parts.append(part.cut(part.first, min(part.end, start)))
            if part.end > moved.end:
                parts.append(part.cut(max(part.first, moved.end), part.end))
        self._parts = tuple(sorted(parts, key=lambda each: each.first))

    def gather(self, device: torch.device | None = None) -> None:
        """Moves all of them into memory of their own on ``device``, or in host memory (None)."""
        numel = self.numel
        memory = (
            host_empty(numel, torch.bfloat16, "the upper halves of split masters")
            if device is None
            else torch.empty(numel, dtype=torch.bfloat16, device=device)
        )
        self.move_in(0, memory)
