"""Where ``accumulate_dtype="fp32"`` adds micro-batches up: on the device, or in host memory if that is too full."""

from __future__ import annotations

from superoffload.engine.engine import Engine
from superoffload.gradient_source import main_grad_of
from superoffload.host.tensors import is_dtensor
from superoffload.optimizer.watched import Tracked

_BYTES = 4  # of an element in fp32


class HostSums:
    """One optimizer's. Decided once, at the first gradient that is known to be a part of a sum: the device has seen a
    forward then, so that its peak is known."""

    def __init__(self, core: Engine, *, wanted: bool) -> None:
        self._core = core
        self._chosen = None if wanted and core.link.frees_gradients else False

    @property
    def are_off(self) -> bool:
        """Whether no gradient is added up there."""
        return self._chosen is False

    def serve(self, tracked: Tracked) -> bool:
        """Whether passes before the last one are packed, and what further ones give is added to what is packed."""
        if self._chosen is False or tracked.param.grad is None or main_grad_of(tracked.param) is not None:
            return False
        if is_dtensor(tracked.param) or tracked.shard.resident:  # whose packed gradient is on the device anyway
            return False
        if self._chosen is None:
            numel = sum(shard.numel for shard in self._core.shards if not shard.resident)
            self._chosen = not self._core.link.has_room(_BYTES * numel)
        return self._chosen
