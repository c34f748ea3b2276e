"""A gradient is freed once it was packed, and copied back if it is needed again, which costs time and memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from superoffload.engine.bucket import Shard
from superoffload.engine.engine import Engine
from superoffload.host.memory import room_on_device
from superoffload.host.tensors import local_of, out_of_order
from superoffload.optimizer.accumulation import HostAccumulation
from superoffload.optimizer.advice import Advice
from superoffload.optimizer.lifetime import Lifetime, weakly
from superoffload.optimizer.params import Params
from superoffload.optimizer.placeholder import GradientPlaceholder, gradient_is_gone, packed_in
from superoffload.optimizer.tracked_param import TrackedParam


@dataclass(eq=False, repr=False)
class FreedGradients:
    """Puts a placeholder in the place of a packed gradient, and brings the gradient back when it is needed."""

    _lifetime: Lifetime
    _engine: Engine
    _params: Params
    host_accumulation: HostAccumulation
    _advice: Advice

    def __post_init__(self) -> None:
        self._said = False
        self._fetch, self._offer = weakly(self._bring_back), weakly(self._take_addend)

    # ---- events of the engine -----------------------------------------------------------------------------------

    def packed(self, shard: Shard) -> None:
        """Frees the gradient, since the engine does not need it again, and puts a placeholder in its place."""
        tracked = self._params.of_shard(shard.index)
        assert tracked is not None
        if tracked.gradient.handed is None or shard.keeps_gradient:  # it belongs to a reduction, or is p.main_grad
            return
        tracked.gradient.free(self._fetch, self._offer)

    def making_way(self) -> None:
        """Brings back gradients that ``p.grad`` still shows, before buckets are laid out again."""
        for tracked in self._params:
            packed, shown = tracked.gradient.placeholder, packed_in(tracked.param.grad)
            if packed is not None and packed is shown and not packed.zeroed:
                packed.bring_back()
        for tracked in self._params:
            tracked.gradient.forget_placeholder()

    # ---- calls of placeholders --------------------------------------------------------------------------------

    def is_packed(self, tracked: TrackedParam, packed: GradientPlaceholder) -> bool:
        """Returns whether ``packed`` stands for the gradient that the engine has of this step."""
        return tracked.gradient.is_placeholder(packed) and self._engine.has_gradient(tracked.shard)

    def _take_addend(self, packed: GradientPlaceholder, addend: Tensor) -> None:
        """Keeps ``addend``, from any thread, for the hook of its parameter to add in host memory."""
        with self._lifetime.alone:
            tracked = self._params.of_shard(packed.shard)
            if tracked is None or self._lifetime.work.out_of_use() or not self.is_packed(tracked, packed):
                return
            if (
                packed.addend is None
                and packed.in_memory is None
                and self.host_accumulation.serve(tracked.param, tracked.shard)
            ):
                packed.keep_addend(addend)

    def _bring_back(self, packed: GradientPlaceholder) -> None:
        """Brings the gradient back, for any thread. Leaves ``packed`` as it is where the gradient is gone."""
        with self._lifetime.whole().alone:
            tracked = self._params.of_shard(packed.shard)
            if tracked is None or tracked.gradient.placeholder is not packed or self._lifetime.work.out_of_use():
                return
            if packed.in_memory is None:
                self.bring_back(tracked, packed)

    @torch.no_grad()
    def bring_back(self, tracked: TrackedParam, packed: GradientPlaceholder) -> None:
        """Fills ``packed`` with a copy of the packed gradient on the parameter's device, even in inference mode."""
        holding, local = tracked.holding, local_of(tracked.param)
        if holding.is_flat:
            raise gradient_is_gone(packed.of, "this rank has packed a part of it (replicated='shard')")
        with torch.inference_mode(False), room_on_device(f"{packed.of}: bringing its gradient back", _LESS):
            flat = torch.empty(tracked.shard.numel, dtype=packed.dtype, device=packed.device)
            self._engine.packer.copy_packed(tracked.shard, flat)
            gradient = out_of_order(flat, local.shape, holding.order)
            packed.fill(gradient)
            try:
                tracked.gradient.brought_back()
            except BaseException:
                packed.empty()
                raise
            addend = packed.take_addend()
            if addend is not None:  # after its sums were taken, so that the addition shows as an edit
                gradient.add_(addend)
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
