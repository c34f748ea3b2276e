"""The gradient of a DTensor may lie over the ranks in another way than the parameter, and gets its layout.

Under tensor parallelism without ``fully_shard``, autograd leaves what an operation gave: each rank's summand of the
gradient (Partial) for a norm under sequence parallelism, the whole gradient for a sharded embedding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from superoffload.host.tensors import is_dtensor


@torch.no_grad()
def lay_out_like(param: Tensor) -> None:
    """Puts into ``p.grad`` the same gradient in the layout of the parameter, a DTensor, if it has another one.

    Collective over the parameter's mesh if so: all its ranks have the same operations, and so the same layouts.
    """
    grad = param.grad
    if is_dtensor(grad) and is_dtensor(param) and grad.placements != param.placements:
        param.grad = grad.redistribute(placements=param.placements)
