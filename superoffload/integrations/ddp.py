"""Adapts ``DistributedDataParallel``: gradients are read from its communication hook, after the reduction.

The hooks of single parameters run before DDP reduces; only the reduction itself knows when a gradient is final.
A bucket in this file is one of DDP's.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from superoffload.errors import ArgumentError
from superoffload.host.signals import Alone
from superoffload.optimizer.advice import Advice
from superoffload.optimizer.frameworks import Framework, Reductions, TakesReduced

_MOST_IDLE = 3


class Reduction(NamedTuple):
    """Holds one bucket of DDP's whose reduction is under way."""

    future: torch.futures.Future[Tensor]
    params: Sequence[Tensor]
    began_on: torch.cuda.Stream | None = None  # the current stream then; None on processors


class DdpReductions(Reductions):
    """Hands reduced gradients to its taker, in the thread that runs backward.

    One bucket's reduction ends while backward computes the next ones, so each bucket's hook hands over the reductions
    that are done. The rest is handed over when backward ends. By then DDP has written the gradients where users see
    them, and the taker learns where ``param.grad`` is what it has taken, so that no comparison is needed.
    """

    def __init__(self, group: Any, alone: Alone) -> None:
        self._taker: Callable[[], TakesReduced | None] = _no_taker
        self._alone = alone  # another thread, or a signal's handler, may call finish() or forget()
        self._waiting: deque[Reduction] = deque()
        self._delivered: list[tuple[Tensor, Tensor]] = []  # in this backward
        # p.grad and its version just before DDP writes the reduced gradient; (None, 0) until then.
        self._shown: dict[Tensor, tuple[Tensor | None, int]] = {}
        self._watches = False
        self._idle = 0  # steps in a row without a reduction
        self._group = group
        self._stream: torch.cuda.Stream | None = None
        self._ordered_by_future = False  # known once there is a stream

    def give_to(self, taker: TakesReduced | None) -> None:
        self._taker = _no_taker if taker is None else ref(taker)
        if taker is None:
            self.forget()
            for hook in _HOOKS.values():
                hook.followers.discard(self)

    def watch(self) -> None:
        """Hands over what is reduced by now, and the rest when the backward that runs ends."""
        self.drain()
        if not self._watches:
            # Callbacks run in the order of their queue. DDP queues its own, which ends backward, after this one.
            torch.autograd.Variable._execution_engine.queue_callback(self._before_the_end)
            self._watches = True

    def begins(self, reduction: Reduction) -> None:
        """Notes that a reduction is under way."""
        self._idle = 0
        self._waiting.append(reduction)
        self._shown.update(dict.fromkeys(reduction.params, (None, 0)))

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
            # DDP has copied it there, or it lies in DDP's own memory. Else it is from before this backward.
            if grad is not before or grad._version != version or grad.data_ptr() == reduced.data_ptr():
                self._keep(param)
        self._forget_backward()

    def _keep(self, param: Tensor) -> None:
        taker = self._taker()
        if taker is not None:
            taker.confirm_reduced(param)

    def stepped(self, advice: Advice) -> None:
        self._idle += 1
        if self._idle == _MOST_IDLE + 1:
            advice.keep(
                f"the DistributedDataParallel that is followed has reduced no gradient in {_MOST_IDLE} steps, so "
                "nothing is stepped during backward. The result is right. Where the model was put into another one, "
                "make a new optimizer for that, and load the state_dict() of this one"
            )

    def leave_join(self) -> None:
        """Tells the taker that this rank has no more inputs in ``join()`` while others go on."""
        taker = self._taker()
        if taker is not None:
            taker.leave_join()

    def drain(self) -> None:
        """Hands over the gradients that are reduced by now."""
        with self._alone:
            while self._waiting and self._waiting[0].future.done():
                self._hand_over(self._waiting.popleft())

    def _hand_over(self, reduction: Reduction) -> None:
        with self._beside_backward(reduction):
            reduced, at, taker = reduction.future.wait(), 0, self._taker()
            for param in reduction.params:
                gradient = reduced.view(-1)[at : at + param.numel()]
                if taker is not None:
                    taker.take_reduced(param, gradient)
                self._delivered.append((param, gradient))
                at += param.numel()

    @contextmanager
    def _beside_backward(self, reduction: Reduction) -> Iterator[None]:
        """Waits for a reduction on a stream of our own, so that backward goes on. On a GPU a reduction is "done" once
        it is enqueued, and waiting for it makes the current stream wait."""
        if reduction.began_on is None:
            yield
            return
        device = reduction.params[0].device
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
            self._ordered_by_future = _is_nccl(self._group)
        if not self._ordered_by_future:
            # Gloo's worker thread copies the sum to the device on a private stream, and its future orders nothing.
            # Torch 2.6 to 2.10 make the worker's current stream, the default stream, wait for that copy before the
            # future is done. Other versions and backends order the caller's stream.
            self._stream.wait_stream(torch.cuda.default_stream(device))
            self._stream.wait_stream(reduction.began_on)
        with torch.cuda.stream(self._stream):
            yield

    def finish(self) -> None:
        """Hands over, at ``step()``, the gradients that an interrupted backward has left."""
        self.drain()
        self._forget_backward()

    def forget(self) -> None:
        """Drops the gradients of a backward that is given up."""
        self._waiting.clear()
        self._forget_backward()

    def _forget_backward(self) -> None:
        self._delivered.clear()
        self._shown.clear()
        self._watches = False


def _no_taker() -> None:
    """Returns None until a taker is given."""


class CommHook:
    """Is the communication hook of a model, which stays there as long as the model. Optimizers follow it."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.group = model.process_group
        self.followers: WeakSet[DdpReductions] = WeakSet()
        try:
            model.register_comm_hook(self, _reduce)
        except RuntimeError as error:
            raise ArgumentError(
                f"model: this DistributedDataParallel has a communication hook already ({error}); leave model= out "
                "and gradients are read at step(), without speculation"
            ) from error

    def __reduce__(self) -> Any:  # a copy of the model, as torch.save() makes one, is followed by no optimizer
        return str, ("superoffload",)

    def reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Reduces as DDP does without a hook."""
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        followers = list(self.followers)
        if not _is_in_backward():  # in join(): this rank adds zeros to the gradients of others
            future = allreduce_hook(self.group, bucket)
            if bucket.is_last():
                future.wait()
                for follower in followers:
                    follower.leave_join()
            return future
        for follower in followers:
            follower.watch()
        params = bucket.parameters()
        began_on = torch.cuda.current_stream(params[0].device) if _on_gpu(params[0]) else None
        future = allreduce_hook(self.group, bucket)
        for follower in followers:
            follower.begins(Reduction(future, params, began_on))
        return future


def _reduce(hook: CommHook, bucket: Any) -> torch.futures.Future[Tensor]:
    return hook.reduce(bucket)


_reduce.__annotations__ = {}  # DDP would compare them with its own types
_HOOKS: WeakKeyDictionary[DistributedDataParallel, CommHook] = WeakKeyDictionary()


def _is_in_backward() -> bool:
    in_backward: bool = torch._C._current_graph_task_id() != -1
    return in_backward


def _on_gpu(param: Tensor) -> bool:
    return param.is_cuda


def _is_nccl(group: Any) -> bool:
    """Tells whether ``group`` reduces tensors on GPUs by NCCL, whose futures order the stream that waits for them."""
    from torch.distributed.distributed_c10d import get_backend_config

    backends = dict(one.split(":") for one in get_backend_config(group).split(","))
    return backends.get("cuda") == "nccl"


def _state_of(grad: Tensor | None) -> tuple[Tensor | None, int]:
    return grad, 0 if grad is None else grad._version


class Ddp(Framework):
    def reduces_later(self, model: nn.Module) -> bool:
        return isinstance(model, DistributedDataParallel)

    def reducing(self, params: Collection[Tensor]) -> nn.Module | None:
        """Looks through all objects once: a program, or its framework, may wrap the model after the optimizer is made.
        None, too, where several have the parameters."""
        found = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
        fitting = [model for model in found if set(params) <= set(model.parameters())]
        return fitting[0] if params and len(fitting) == 1 else None

    def follow_reductions(self, model: nn.Module, alone: Alone) -> Reductions | None:
        if not isinstance(model, DistributedDataParallel):
            return None
        hook = _HOOKS.get(model)
        if hook is None:
            hook = _HOOKS[model] = CommHook(model)
        follower = DdpReductions(hook.group, alone)
        hook.followers.add(follower)
        return follower

    def check_fp32_sums(self, model: nn.Module, params: Sequence[tuple[str, Tensor]]) -> None:
        training = [name for name, param in params if param.requires_grad]
        if training and isinstance(model, DistributedDataParallel):
            raise ArgumentError(
                f"accumulate_dtype='fp32': {training[0]} is reduced by DistributedDataParallel, which takes gradients "
                "in the parameter's dtype only; use fully_shard with MixedPrecisionPolicy(reduce_dtype=torch.float32), "
                "or p.main_grad in float32, to which you add what DDP has reduced"
            )


ADAPTER = Ddp()
