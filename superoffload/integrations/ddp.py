"""``torch.nn.parallel.DistributedDataParallel``: gradients as its communication hook has reduced them.

The hooks of single parameters run before DDP reduces; only the reduction itself knows when a gradient is final. DDP
inspects the annotations of hooks, so this file must not postpone their evaluation.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from superoffload.errors import ArgumentError

Deliver = Callable[[Tensor, Tensor], None]
Kept = Callable[[Tensor], None]
Alone = AbstractContextManager[Any]


class ReducedGradients:
    """Hands reduced gradients of ``model`` to ``deliver(param, flat gradient)``, in the thread that runs backward.

    The reduction of one bucket ends while backward computes the next ones, so it is looked at when the next bucket
    starts its own; what is left then is drained when backward has ended. By then DDP has put the gradients where users
    see them: ``kept(param)`` says that ``param.grad`` has just what was delivered, so that nobody need compare them.
    """

    def __init__(self, model: DistributedDataParallel, deliver: Deliver, kept: Kept, alone: Alone) -> None:
        self._deliver = deliver
        self._kept = kept
        self._alone = alone  # another thread, or a signal's handler, may call finish() or forget()
        self._waiting: deque[tuple[torch.futures.Future[Tensor], Sequence[Tensor]]] = deque()
        self._delivered: list[tuple[Tensor, Tensor]] = []  # in this backward
        self._shown: dict[Tensor, tuple[Tensor | None, int]] = {}  # p.grad and its version, before DDP puts it there
        self._watches = False
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
        if not self._watches:
            # Run in the order in which they were queued, and DDP queues its own, which ends backward, after this one.
            torch.autograd.Variable._execution_engine.queue_callback(self._before_the_end)
            self._watches = True
        future = allreduce_hook(self._group, bucket)
        params = bucket.parameters()
        self._waiting.append((future, params))
        self._shown.update(dict.fromkeys(params, (None, 0)))
        return future

    def _before_the_end(self) -> None:
        for param in self._shown:
            self._shown[param] = _state_of(param.grad)
        torch.autograd.Variable._execution_engine.queue_callback(self._at_the_end)

    def _at_the_end(self) -> None:
        self.drain()
        for param, reduced in self._delivered:
            grad = param.grad
            if grad is None or grad.dtype != reduced.dtype:
                continue
            before, version = self._shown.get(param, (grad, grad._version))
            # DDP has copied it there, or it lies in DDP's own memory; else it is an older one that DDP has left alone.
            if grad is not before or grad._version != version or grad.data_ptr() == reduced.data_ptr():
                self._kept(param)
        self._rest()

    def drain(self) -> None:
        """Hands over what has been reduced by now."""
        with self._alone:
            while self._waiting and self._waiting[0][0].done():
                self._hand_over(*self._waiting.popleft())

    def _hand_over(self, future: torch.futures.Future[Tensor], params: Sequence[Tensor]) -> None:
        with self._beside_backward(params[0]):
            reduced, at = future.wait(), 0
            for param in params:
                gradient = reduced.view(-1)[at : at + param.numel()]
                self._deliver(param, gradient)
                self._delivered.append((param, gradient))
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

    def finish(self) -> None:
        """At ``step()``: whatever a backward that was cut off has left."""
        self.drain()
        self._rest()

    def forget(self) -> None:
        """A backward whose gradients are given up."""
        self._waiting.clear()
        self._rest()

    def _rest(self) -> None:
        self._delivered.clear()
        self._shown.clear()
        self._watches = False


def _state_of(grad: Tensor | None) -> tuple[Tensor | None, int]:
    return grad, 0 if grad is None else grad._version


def reduced_gradients(model: nn.Module | None, deliver: Deliver, kept: Kept, alone: Alone) -> ReducedGradients | None:
    """None if ``model`` is not DDP."""
    return ReducedGradients(model, deliver, kept, alone) if isinstance(model, DistributedDataParallel) else None
