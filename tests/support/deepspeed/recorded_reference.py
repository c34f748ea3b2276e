"""torch.optim.AdamW on the recorded gradients of two ranks, some of them absent."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from tests.support.deepspeed.training import Recorded, recorded_gradient

UNUSED = 4  # the dot that some steps or micro-batches leave out


def reference(
    windows: list[list[dict[int, Tensor]]],
    accumulation: int,
    clip: float,
    skip: Collection[int] = (),
    eps: float = 1e-8,
) -> dict[str, Tensor]:
    """torch.optim.AdamW on all gradients at once, averaged over ranks; an unused parameter has a gradient of zeros."""
    torch.manual_seed(1)
    model = Recorded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, eps=eps)
    for step, micros in enumerate(windows):
        if step in skip:
            continue
        for index, param in enumerate(model.parameters()):
            param.grad = torch.zeros_like(param)
            for gradients in micros:
                if index in gradients:
                    param.grad += gradients[index] / accumulation
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


def gradients_of(step: int, micro: int, skip: tuple[int, ...] = ()) -> dict[int, Tensor]:
    """The mean over two ranks, fp32 as the config of these tests accumulates."""
    return {
        index: (recorded_gradient(step, micro, 0, index, shape) + recorded_gradient(step, micro, 1, index, shape)) / 2
        for index, shape in enumerate(Recorded.SHAPES)
        if index not in skip
    }


NAME = f"dots.{UNUSED}.weight"
