"""In which format gradients and parameters travel. The bits of a step do not depend on it, only its time."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TransferPolicy:
    """``wide``: fp32 on the link, cast on the device. ``direct``: the pack kernel stores into host memory by itself."""

    name: str
    wide: bool
    direct: bool

    def packed_dtype(self, gradient: torch.dtype) -> torch.dtype:
        return torch.float32 if self.wide else gradient

    def shadow_dtype(self, published: torch.dtype) -> torch.dtype:
        return torch.float32 if self.wide else published

    def fits(self, *, kernels: bool, pinned: bool) -> bool:
        """Casting needs our kernels on the device; direct stores need memory that it can reach, too."""
        return (kernels or not (self.wide or self.direct)) and (pinned or not self.direct)


NARROW = TransferPolicy("narrow", wide=False, direct=False)
WIDE = TransferPolicy("wide", wide=True, direct=False)
DIRECT = TransferPolicy("direct", wide=False, direct=True)
POLICIES = {policy.name: policy for policy in (NARROW, WIDE, DIRECT)}
