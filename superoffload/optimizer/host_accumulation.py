"""``accumulate_dtype="fp32"`` adds micro-batches up on the device, or in host memory if the device is too full.

This file decides which; ``Packer.add`` (superoffload/engine/inbox.py) adds in host memory."""

from __future__ import annotations

from superoffload.engine.engine import Engine
from superoffload.host.tensors import is_dtensor
from superoffload.optimizer.gradient_source import main_grad_of
from superoffload.optimizer.tracked_param import TrackedParam

_BYTES = 4  # of an element in fp32


class HostAccumulation:
    """Decides once per optimizer, at the first gradient that is part of a sum. The device has seen a forward by then,
    so its peak of memory is known."""

    def __init__(self, engine: Engine, *, wanted: bool) -> None:
        self._engine = engine
        self._chosen = None if wanted and engine.link.frees_gradients else False

    @property
    def are_off(self) -> bool:
        """Returns whether no gradient is added up in host memory."""
        return self._chosen is False

    def serve(self, tracked: TrackedParam) -> bool:
        """Returns whether this gradient is packed before the last pass, and further passes add to the packed one."""
        if self._chosen is False or tracked.param.grad is None or main_grad_of(tracked.param) is not None:
            return False
        if is_dtensor(tracked.param) or tracked.shard.resident:  # a resident one's packed gradient is on the device
            return False
        if self._chosen is None:
            numel = sum(shard.numel for shard in self._engine.shards if not shard.resident)
            self._chosen = not self._engine.link.has_room(_BYTES * numel)
        return self._chosen
