"""Times our kernels on every instruction set, torch's fused AdamW, DeepSpeed's CPU Adam, and the limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import workload as settings
from benchmarks.bandwidth.limit import Arrays, MemoryLimit
from benchmarks.timing import Contestant, timed
from benchmarks.workload import Workload
from superoffload import _native, kernels
from superoffload.errors import SuperOffloadError

Operation = _native.Operation

# name of the row: operation for the memory limit, bytes per code
OPERATIONS = {
    "step": ("step", 1),
    "journaled": ("journaled", 1),
    "journaled, 2-byte codes": ("journaled", 2),
    "undo": ("undo", 1),
    "replay": ("replay", 1),
    "publish": ("publish", 1),
}
READING = "publish, reading alone"  # has a limit only
TORCH_STEP, TORCH_JOB = "torch fused step", "torch fused, same job"
DEEPSPEED_STEP, DEEPSPEED_JOB = "DeepSpeedCPUAdam step", "DeepSpeedCPUAdam, same job"


def limit_name(row: str) -> str:
    return f"limit of {row}"


def limits(workload: Workload, cpus: Sequence[int]) -> tuple[list[Contestant], dict[str, MemoryLimit]]:
    """Returns a contestant per row of ours, a walk over the same bytes, and one that only reads what publish reads."""
    arrays = Arrays(
        workload.master,
        workload.exp_avg,
        workload.exp_avg_sq,
        workload.gradient,
        workload.shadow,
        workload.codes,
        workload.split,
    )
    found = {
        row: MemoryLimit(*operation, arrays, cpus) for row, operation in {**OPERATIONS, READING: ("reading", 1)}.items()
    }
    return [
        Contestant(limit_name(row), "", limit.bytes_per_param, limit.seconds) for row, limit in found.items()
    ], found


class OurKernels:
    """Drives the kernels of one instruction set through the worker pool as the optimizer does."""

    def __init__(self, workload: Workload, pool: _native.WorkerPool, isa: str) -> None:
        self._workload = workload
        self._pool = pool
        self._isa = isa

    def contestants(self, bytes_of: Callable[[str], float]) -> list[Contestant]:
        calls = {
            "step": timed(self.step),
            "journaled": timed(lambda: self.journaled(1)),
            "journaled, 2-byte codes": timed(lambda: self.journaled(2)),
            "undo": timed(self.undo, prepare=lambda: self.journaled(1)),
            "replay": timed(self.replay, prepare=lambda: self.journaled(1)),
            "publish": timed(self.publish, finish=self.settle if self._workload.split else self._workload.take_back),
        }
        return [Contestant(row, self._isa, bytes_of(row), self._with_isa(call)) for row, call in calls.items()]

    def _with_isa(self, call: Callable[[int], float]) -> Callable[[int], float]:
        def seconds(repeats: int) -> float:
            kernels.set_isa(self._isa)
            return call(repeats)

        return seconds

    def step(self) -> None:
        self._pool.submit(self._workload.next_work(), Operation.step).wait()

    def journaled(self, width: int) -> None:
        work = self._workload.next_work()
        self._pool.submit(work, Operation.step_journaled, width).wait()
        if work.overflowed:
            raise SuperOffloadError(
                f"the journal of the benchmark's arrays overflowed (codes of {width} bytes): their gradients are not "
                "what training gives; this is a bug of the benchmark, please report it"
            )

    def undo(self) -> None:
        self._pool.submit(self._workload.current_work, Operation.undo).wait()
        self._workload.take_back()

    def replay(self) -> None:
        self._workload.freeze(gradient_factor=0.5)
        self._pool.submit(self._workload.current_work, Operation.replay).wait()

    def publish(self) -> None:
        self._pool.submit(self._workload.next_work(), Operation.publish).wait()

    def settle(self) -> None:
        """Makes the masters whole that `publish` has left, as the second phase of a step does."""
        self._pool.submit(self._workload.current_work, Operation.settle).wait()


@dataclass(frozen=True)
class Peer:
    """Runs another library's fused CPU step on the workload's own master and moments, with an fp32 gradient."""

    step: Callable[[], None]
    gradient: Tensor  # fp32, what its step reads

    def same_job(self, workload: Workload) -> None:
        """Does what our step does: from a bf16 gradient to a bf16 parameter."""
        self.gradient.copy_(workload.gradient)
        self.step()
        workload.shadow.copy_(workload.master)

    def contestants(self, names: tuple[str, str], workload: Workload) -> list[Contestant]:
        return [
            Contestant(names[0], "", 28.0, timed(self.step), settles=True),
            Contestant(names[1], "", 28.0, timed(lambda: self.same_job(workload)), settles=True),
        ]


def _laid_over(optimizer_class: Any, workload: Workload, step: Any, **options: Any) -> Peer:
    """Lays another library's optimizer over the workload's memory; ``step``: its step count, in its own form."""
    parameter = torch.nn.Parameter(workload.master)
    parameter.grad = workload.gradient.float()
    optimizer = optimizer_class(
        [parameter],
        lr=settings.LR,
        betas=settings.BETAS,
        eps=settings.EPS,
        weight_decay=settings.WEIGHT_DECAY,
        **options,
    )
    optimizer.state[parameter] = {"step": step, "exp_avg": workload.exp_avg, "exp_avg_sq": workload.exp_avg_sq}
    return Peer(optimizer.step, parameter.grad)


def torch_peer(workload: Workload) -> Peer:
    """Returns `torch.optim.AdamW(fused=True)` with its state laid over the workload's."""
    step = torch.tensor(float(workload.step))
    return _laid_over(torch.optim.AdamW, workload, step, fused=True)


class PeerMissing(Exception):
    """Says why a peer cannot take part."""


def load_deepspeed() -> Any:
    """Returns DeepSpeed's class with its kernel built (it compiles at first use); raises PeerMissing."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        raise PeerMissing("not installed") from None
    try:
        DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(8))])
    except Exception as error:  # whatever its build system raises
        raise PeerMissing(f"installed, but its kernel cannot be used: {' '.join(str(error).split())[:200]}") from error
    return DeepSpeedCPUAdam


def deepspeed_peer(deepspeed_class: Any, workload: Workload) -> Peer:
    """Returns `DeepSpeedCPUAdam` with its state laid over the workload's."""
    return _laid_over(deepspeed_class, workload, workload.step, adamw_mode=True)
