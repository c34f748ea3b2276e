"""What the kernels of csrc/cuda do, in torch's operations, for machines without NVRTC: slower, the same bits.

Works on tensors of any device. Nothing here waits for the device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from superoffload.bucket import BLOCK

_SUMS = 16
_CANONICAL_NAN = {torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}


def pack(gradient: Tensor, packed: Tensor, sums: Tensor | None = None) -> Tensor:
    """Copies a flat gradient into its packed place, which has its dtype or float32, and returns its block sums.

    ``sums``: where they go (float64, one per block of 1024 elements, the last one perhaps not full). They have the bits
    of ``superoffload._native.pack``: +inf where any element is not finite.
    """
    packed.copy_(_exactly(gradient) if packed.dtype is not gradient.dtype else gradient)
    found = _block_sums(gradient)
    return found if sums is None else sums.copy_(found)


def unpack(staged: Tensor, parameter: Tensor) -> None:
    """Copies staged parameters, of their dtype or float32, into a flat parameter, rounded to nearest even."""
    parameter.copy_(staged)
    if staged.dtype is not parameter.dtype:
        words = parameter.view(torch.int16)
        words.masked_fill_(torch.isnan(staged), _CANONICAL_NAN[parameter.dtype])


def _exactly(gradient: Tensor) -> Tensor:
    """As float32. A conversion of fp16 may change which NaN it is; ours does not."""
    values = gradient.to(torch.float32)
    if gradient.dtype is torch.float16:
        words = gradient.view(torch.int16).to(torch.int32)
        raw = ((words & 0x8000) << 16) | 0x7F800000 | ((words & 0x3FF) << 13)
        values = torch.where(torch.isnan(gradient), raw, values.view(torch.int32)).view(torch.float32)
    return values


def _block_sums(gradient: Tensor) -> Tensor:
    """Element i of a block goes to running sum i % 16, in order; then the sums are folded by halves."""
    blocks = -(-gradient.numel() // BLOCK)
    squares = gradient.new_zeros(blocks * BLOCK, dtype=torch.float64)
    squares[: gradient.numel()] = gradient
    squares.square_()  # exact: a product of two fp32 values
    rows = squares.view(blocks, BLOCK // _SUMS, _SUMS)
    sums = torch.zeros(blocks, _SUMS, dtype=torch.float64, device=gradient.device)
    for row in range(rows.shape[1]):
        sums += rows[:, row]
    half = _SUMS // 2
    while half:
        sums = sums[:, :half] + sums[:, half : 2 * half]
        half //= 2
    return torch.nan_to_num(sums[:, 0], nan=math.inf, posinf=math.inf)
