"""Moments are read and loaded as numbers, in whatever dtype a shard stores them.

8-bit moments are stored as bytes (uint8): first a code for each element of the shard, then a scale for each block of
256 elements. A code is a small floating-point number; its block's scale is the biased exponent of the topmost binade,
255 if all moments of the block are NaN. docs/kernel.md has the format. bfloat16 has all of their values.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from superoffload import _native
from superoffload.engine.bucket import Shard
from superoffload.errors import ArgumentError

Axes = tuple[tuple[int, int], ...]


def noise_stream(seed: int, name: str) -> int:
    """Returns the 64 bits that stand for ``seed`` and for the parameter of the qualified name ``name``."""
    digest = blake2b(name.encode(), digest_size=8, key=seed.to_bytes(4, "little")).digest()
    return int.from_bytes(digest, "little")


def check_axes(name: str, axes: Axes) -> Axes:
    """Returns ``axes`` (``Shard.axes``); raises if there are more than the kernels know."""
    if len(axes) > _native.MAX_AXES:
        raise ArgumentError(
            f"{name}: its part on this rank is cut, or lies in memory, along {len(axes)} dimensions, expected at most "
            f"{_native.MAX_AXES} with rounded moments; pass state_dtype='fp32', or make the parameter contiguous"
        )
    return axes


PER_SCALE: int = _native.MOMENT_BLOCK  # elements that share a scale
_AT_ONCE = 1 << 17  # elements to convert at a time, so that little memory is needed beside them
_NAN_SCALE = 255


@dataclass(frozen=True)
class CodeFormat:
    """Describes the codes of a moment; with ``signed``, the topmost of the eight bits is the sign."""

    exponent_bits: int
    fraction_bits: int
    signed: bool

    @property
    def top(self) -> int:
        """Returns the largest code of a magnitude."""
        return (1 << (self.exponent_bits + self.fraction_bits)) - 1

    @property
    def binades(self) -> int:
        """Counts the binades from that of the denormal codes to the topmost one."""
        return (1 << self.exponent_bits) - 1

    @property
    def dropped_bits(self) -> int:
        """Counts the fraction bits of float32 that codes lack."""
        return 23 - self.fraction_bits


EXP_AVG = CodeFormat(exponent_bits=4, fraction_bits=3, signed=True)
EXP_AVG_SQ = CodeFormat(exponent_bits=5, fraction_bits=3, signed=False)


def stored_numel(numel: int, dtype: torch.dtype) -> int:
    """Returns how many elements of ``dtype`` store the moment of ``numel`` parameters."""
    return numel + (-(-numel // PER_SCALE) if dtype == torch.uint8 else 0)


def shown_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which moments that are stored in ``dtype`` are read."""
    return torch.bfloat16 if dtype == torch.uint8 else dtype


def scales_address(moment: Tensor, numel: int, start: int = 0) -> int:
    """Returns the address of the scale of the block that begins at element ``start`` of ``moment``, which is stored for
    ``numel`` parameters; 0: it has no scales."""
    return moment.data_ptr() + numel + start // PER_SCALE if moment.dtype == torch.uint8 else 0


def read_exp_avg(shard: Shard) -> Tensor:
    """Returns exp_avg, flat: the stored tensor itself, or of 8-bit moments a copy in bfloat16."""
    return read_moment(shard.exp_avg, shard.numel, EXP_AVG)


def read_exp_avg_sq(shard: Shard) -> Tensor:
    """Returns exp_avg_sq, flat: the stored tensor itself, or of 8-bit moments a copy in bfloat16."""
    return read_moment(shard.exp_avg_sq, shard.numel, EXP_AVG_SQ)


def read_moment(stored: Tensor, numel: int, form: CodeFormat) -> Tensor:
    """Returns the moment of ``numel`` elements that ``stored`` has: itself, or of 8-bit moments a bfloat16 copy."""
    if stored.dtype != torch.uint8:
        return stored
    found = torch.empty(numel, dtype=torch.bfloat16, device=stored.device)
    for at in range(0, numel, _AT_ONCE):
        end = min(at + _AT_ONCE, numel)
        scales = stored[numel + at // PER_SCALE : numel + -(-end // PER_SCALE)]
        found[at:end] = _decode(stored[at:end], scales, form)
    return found


def write_moment(stored: Tensor, numel: int, form: CodeFormat, blocks: Iterable[tuple[int, Tensor]]) -> None:
    """Overwrites a moment of ``numel`` elements by flat blocks of finite float32 values, each with its offset.

    The blocks cover every element once. Values that codes lack are rounded to nearest, but no exp_avg_sq above 0 to 0.
    """
    if stored.dtype != torch.uint8:
        for at, block in blocks:
            stored[at : at + len(block)].copy_(block)
        return
    cut: dict[int, list[tuple[int, Tensor]]] = {}  # blocks of codes that the given ones cut, by their start
    for at, block in blocks:
        first = min(-(-at // PER_SCALE) * PER_SCALE, at + len(block))
        last = at + len(block) if at + len(block) == numel else max(first, (at + len(block)) // PER_SCALE * PER_SCALE)
        _encode_into(stored, numel, form, first, block[first - at : last - at])
        for begin, part in ((at, block[: first - at]), (last, block[last - at :])):
            if len(part):
                _add_part(stored, numel, form, cut, begin, part)


def _add_part(
    stored: Tensor, numel: int, form: CodeFormat, cut: dict[int, list[tuple[int, Tensor]]], at: int, part: Tensor
) -> None:
    """Keeps a part of a block of codes until all of its parts are there; their scale depends on them all."""
    start = at // PER_SCALE * PER_SCALE
    parts = cut.setdefault(start, [])
    parts.append((at, part.clone()))
    if sum(len(one) for _, one in parts) == min(PER_SCALE, numel - start):
        parts.sort(key=lambda one: one[0])
        _encode_into(stored, numel, form, start, torch.cat([one for _, one in parts]))
        del cut[start]


def _encode_into(stored: Tensor, numel: int, form: CodeFormat, at: int, values: Tensor) -> None:
    """Stores ``values`` from element ``at`` on, where a block begins; they end at a block's end or at the last."""
    for begin in range(0, len(values), _AT_ONCE):
        codes, scales = _encode(values[begin : begin + _AT_ONCE].to(stored.device), form)
        here = at + begin
        stored[here : here + len(codes)] = codes
        stored[numel + here // PER_SCALE : numel + here // PER_SCALE + len(scales)] = scales


def _encode(values: Tensor, form: CodeFormat) -> tuple[Tensor, Tensor]:
    padded = torch.zeros(-(-len(values) // PER_SCALE) * PER_SCALE, dtype=torch.float32, device=values.device)
    padded[: len(values)] = values
    magnitudes = padded.abs().view(-1, PER_SCALE)
    largest = magnitudes.amax(dim=1, keepdim=True).view(torch.int32)
    # The topmost code must not be below the largest magnitude.
    scales = ((largest + (1 << form.dropped_bits) - 1) >> 23).clamp(form.binades + 1, _NAN_SCALE - 1)
    base = (scales - form.binades) << 23
    # Denormal codes are equally far apart: half of the number, beside the power of two of code 0, has their bits.
    denormal = (magnitudes.double() / 2 + base.view(torch.float32)).float()
    words = torch.maximum(magnitudes, denormal).view(torch.int32) - base
    codes = ((words + (1 << (form.dropped_bits - 1))) >> form.dropped_bits).clamp(max=form.top)
    if form.signed:
        codes |= padded.view(-1, PER_SCALE).signbit().to(torch.int32) * (form.top + 1)
    else:  # as in a step: what is above 0 does not become 0
        codes = torch.where(magnitudes > 0, codes.clamp(min=1), codes)
    return codes.view(-1)[: len(values)].to(torch.uint8), scales.view(-1).to(torch.uint8)


def _decode(codes: Tensor, scales: Tensor, form: CodeFormat) -> Tensor:
    scale = scales.to(torch.int32).repeat_interleave(PER_SCALE)[: len(codes)]
    base = (scale.clamp(form.binades + 1, _NAN_SCALE - 1) - form.binades) << 23
    number = codes.to(torch.int32)
    bits = base + ((number & form.top) << form.dropped_bits)
    normal = bits.view(torch.float32)
    values = torch.minimum(normal, 2 * normal - 2 * base.view(torch.float32))
    if form.signed:
        values = torch.where(number > form.top, -values, values)
    return torch.where(scale == _NAN_SCALE, torch.nan, values)
