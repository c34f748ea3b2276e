"""Brings gradients back that were packed and freed, and tells the user once that it costs time and memory."""

from __future__ import annotations

import torch

from superoffload.engine.engine import Engine
from superoffload.memory import room_on_device
from superoffload.optimizer.advice import Advice
from superoffload.packed_gradient import PackedGradient, gradient_is_gone
from superoffload.ranks.layout import local_of, out_of_order
from superoffload.tracked import Tracked


class FreedGradients:
    """One optimizer's: ``bring_back()`` per gradient."""

    def __init__(self, core: Engine, advice: Advice) -> None:
        self._core = core
        self._advice = advice
        self._said = False

    @torch.no_grad()
    def bring_back(self, tracked: Tracked, packed: PackedGradient) -> None:
        """A copy of what was packed, where the parameter is, whatever mode the reader is in."""
        holding, local = tracked.holding, local_of(tracked.param)
        if holding.flat_chunks:
            raise gradient_is_gone(packed.of, "this rank has packed a part of it (replicated='shard')")
        with torch.inference_mode(False), room_on_device(f"{packed.of}: bringing its gradient back", _LESS):
            flat = torch.empty(tracked.shard.numel, dtype=packed.dtype, device=packed.device)
            self._core.copy_packed(tracked.shard, flat)
            packed.in_memory = out_of_order(flat, local.shape, holding.order)
            try:
                tracked.brought_back()
            except BaseException:
                packed.in_memory = None
                raise
            addend, packed.addend = packed.addend, None
            if addend is not None:  # behind its sums, which then show that it is not what was packed
                packed.in_memory.add_(addend)
        if not self._said:
            self._said = True
            self._advice.keep(
                f"{packed.of}: its gradient was packed and freed during backward, and then needed again. It was copied "
                f"back from host memory, as are all others that are needed again. The result is right. {_FAST_WAY}"
            )


_LESS = (
    "Put every backward() of a step but the last into `with optimizer.accumulate():`, pass max_grad_norm= instead of "
    "clipping, or use smaller micro-batches"
)
_FAST_WAY = (
    "To accumulate, put every backward() of a step but the last into `with optimizer.accumulate():`. To clip, pass "
    "max_grad_norm= to superoffload.AdamW; the norm is in optimizer.grad_norm. Other code that sees or edits gradients "
    "(a GradScaler, logging) is faster with keep_grads=True, which takes the memory of all gradients"
)
