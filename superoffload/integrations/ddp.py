"""``torch.nn.parallel.DistributedDataParallel``: gradients as its communication hook has reduced them.

The hooks of single parameters run before DDP reduces; only the reduction itself knows when a gradient is final. DDP
inspects the annotations of hooks, so this file must not postpone their evaluation.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from superoffload.errors import ArgumentError

Deliver = Callable[[Tensor, Tensor], None]


class ReducedGradients:
    """Hands reduced gradients of ``model`` to ``deliver(param, flat gradient)``, in the thread that runs backward.

    The reduction of one bucket ends while backward computes the next ones, so it is looked at when the next bucket
    starts its own; what is left then is drained at ``step()``.
    """

    def __init__(self, model: DistributedDataParallel, deliver: Deliver) -> None:
        self._deliver = deliver
        self._waiting: deque[tuple[torch.futures.Future[Tensor], Sequence[Tensor]]] = deque()
        self._group = model.process_group
        self._stream: torch.cuda.Stream | None = None
        try:
            model.register_comm_hook(None, self._hook)
        except RuntimeError as error:
            raise ArgumentError(
                f"model: this DistributedDataParallel has a communication hook already ({error}); leave model= out "
                "and gradients are read at step(), without speculation"
            ) from error

    def _hook(self, state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        self.drain()
        future = allreduce_hook(self._group, bucket)
        self._waiting.append((future, bucket.parameters()))
        return future

    def drain(self) -> None:
        """Hands over what has been reduced by now."""
        while self._waiting and self._waiting[0][0].done():
            future, params = self._waiting.popleft()
            with self._beside_backward(params[0]):
                reduced, at = future.wait(), 0
                for param in params:
                    self._deliver(param, reduced.view(-1)[at : at + param.numel()])
                    at += param.numel()

    @contextmanager
    def _beside_backward(self, param: Tensor) -> Iterator[None]:
        """On a GPU a reduction is "done" once it is enqueued, and waiting for it makes the current stream wait: one of
        our own, or backward would stand still for the reduction."""
        if not param.is_cuda:
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(param.device)
        with torch.cuda.stream(self._stream):
            yield

    def forget(self) -> None:
        """A backward whose gradients are given up."""
        self._waiting.clear()


def reduced_gradients(model: nn.Module | None, deliver: Deliver) -> ReducedGradients | None:
    """None if ``model`` is not DDP."""
    return ReducedGradients(model, deliver) if isinstance(model, DistributedDataParallel) else None
