"""DeepSpeed's own Adam kernel behind our schedule: speculated, undone and replayed like ours, in one bucket.

For tests: with it, ours must equal stock to the bit. A journal is a copy here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from superoffload import _native
from superoffload.engine.bucket import Bucket

Operation = _native.Operation


def build() -> str | None:
    """None, or why it cannot be had; DeepSpeed compiles it on first use."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    try:
        CPUAdamBuilder().load()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


class _Clock:
    """One of DeepSpeed's native Adam objects. It multiplies up its powers of beta from call to call, so it must be
    called once for every step number, in order, as stock does."""

    def __init__(self, kernel: Any, key: int, optimizer: Any) -> None:
        self.kernel, self.key, self.step = kernel, key, 0
        group = optimizer.param_groups[0]
        self.rest = (*group["betas"], group["eps"], group["weight_decay"], True)
        beta1, beta2 = group["betas"]
        kernel.create_adam(key, group["lr"], beta1, beta2, group["eps"], group["weight_decay"], True, False)

    def update(self, step: int, lr: float, *tensors: Tensor) -> None:
        while self.step < step - 1:
            self.step += 1
            self.kernel.adam_update(self.key, self.step, lr, *self.rest, *(torch.zeros(1) for _ in range(4)))
        self.step += 1
        assert self.step == step
        self.kernel.adam_update(self.key, step, lr, *self.rest, *tensors)


class StockWork:
    """What a bucket's native work is to the engine, over the whole of DeepSpeed's only sub-group."""

    overflowed = False
    publishes = True
    narrow_escapes = bytes = 0
    escapes = (0, 0, 0)
    current: Any = None  # the ZeRO optimizer under test
    clocks: tuple[_Clock, _Clock]

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.frozen: dict[str, Any] = {}
        self.saved: list[Tensor] = []

    def freeze(self, **scalars: Any) -> None:
        self.frozen = scalars

    def take_journal(self, width: int) -> bool:
        return True

    def take_halves(self) -> bool:
        return True

    def release_journal(self) -> None:
        pass

    def journal_use(self) -> StockWork:
        return self

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        optimizer = self.current
        (flat,) = optimizer.fp32_partitioned_groups_flat
        state = optimizer.optimizer.state[flat]
        return flat.data, state["exp_avg"], state["exp_avg_sq"]

    def run(self, operation: Any) -> None:
        master, first, second = self._tensors()
        if operation in (Operation.undo, Operation.replay):
            for tensor, saved in zip((master, first, second), self.saved, strict=True):
                tensor.copy_(saved)
        if operation == Operation.undo:
            return
        if operation == Operation.step_journaled:
            self.saved = [master.clone(), first.clone(), second.clone()]
        gradient = (
            self.current.grad_partitions_flat_buffer.float() * torch.tensor(self.frozen["gradient_factor"]).float()
        )
        clock = self.clocks[operation == Operation.step_journaled]
        clock.update(max(self.frozen["steps"]), self.frozen["lr"], master, gradient, first, second)
        for piece in self.bucket.pieces:
            part = piece.shard.master[piece.start : piece.start + piece.numel]
            self.bucket.shadow[piece.offset : piece.offset + piece.numel] = part.to(self.bucket.shadow.dtype)


class StockPool:
    """Runs at once what it is given."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool

    def submit(self, work: StockWork, operation: Any, *_: Any) -> Any:
        work.run(operation)
        return _native.Completion.already_done()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pool, name)


@contextmanager
def plugged_in() -> Iterator[None]:
    """Buckets made here step with DeepSpeed's kernel; ``use(optimizer)`` says whose."""
    with mock.patch("superoffload.engine.layout.native_work", lambda bucket, *_, **__: StockWork(bucket)):
        yield


def use(zero_optimizer: Any) -> None:
    engine = zero_optimizer.parts.driver.engine
    engine.executor.pool = StockPool(engine.pool)
    StockWork.current = zero_optimizer
    inner = zero_optimizer.optimizer
    StockWork.clocks = (_Clock(inner.ds_opt_adam, 7001, inner), _Clock(inner.ds_opt_adam, 7002, inner))
