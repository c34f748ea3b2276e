"""Gradients of a ``DistributedDataParallel`` are final once it has reduced them over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol
from weakref import ref

from torch import Tensor, nn

from superoffload.host.signals import Alone
from superoffload.optimizer.weak_hooks import weakly


class TakesReduced(Protocol):
    def take_reduced(self, param: Tensor, gradient: Tensor) -> None: ...
    def keep_reduced(self, param: Tensor) -> None: ...
    def has_no_inputs(self) -> None: ...


class _Reduces(Protocol):
    def finish(self) -> None: ...
    def forget(self) -> None: ...


class _NoReduction:
    def finish(self) -> None: ...
    def forget(self) -> None: ...


class Reductions:
    """Passes reduced gradients on if it follows a model that reduces any; does not keep their taker alive."""

    def __init__(self) -> None:
        self._taker: Callable[[], TakesReduced | None] = _no_taker
        self._reduced: _Reduces = _NoReduction()

    def give_to(self, taker: TakesReduced) -> None:
        self._taker = ref(taker)

    def follow(self, model: nn.Module, alone: Alone) -> None:
        """Follows ``model``; ``alone`` keeps other threads and signal handlers out of unfinished changes."""
        from superoffload.distributed.data_parallel import reduced_gradients

        found = reduced_gradients(model, weakly(self._take), weakly(self._keep), weakly(self._left), alone)
        if found is not None:
            self._reduced = found

    def finish(self) -> None:
        """Finishes, at ``step()``, the reductions that an interrupted backward has left."""
        self._reduced.finish()

    def forget(self) -> None:
        """Forgets a backward whose gradients are given up."""
        self._reduced.forget()

    def end(self) -> None:
        """Follows the model no longer."""
        self._reduced = _NoReduction()

    def _take(self, param: Tensor, gradient: Tensor) -> None:
        taker = self._taker()
        if taker is not None:
            taker.take_reduced(param, gradient)

    def _keep(self, param: Tensor) -> None:
        taker = self._taker()
        if taker is not None:
            taker.keep_reduced(param)

    def _left(self) -> None:
        taker = self._taker()
        if taker is not None:
            taker.has_no_inputs()


def _no_taker() -> None:
    """Returns None until a taker is given."""
