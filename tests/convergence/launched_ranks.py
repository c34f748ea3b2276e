"""Uses the ranks that a launcher such as torchrun has started, on one host or several."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from superoffload.distributed.group import GLOO_HINT, rank_timeout
from superoffload.errors import RankError, SuperOffloadError
from tests.convergence.local_ranks import Outcome

_LONGEST = timedelta(hours=2)


class LaunchedRanks:
    """Runs one function after the other on all ranks, over gloo, as ``LocalRanks`` does on its own; every rank calls
    the same methods. With ``device`` cuda, each rank has the GPU of its local number, and tensors there go over NCCL.
    Close it, or use ``with``."""

    def __init__(self, device: str = "cpu") -> None:
        torch.set_num_threads(1)  # as LocalRanks: sums have the same order
        if device == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which deterministic algorithms need
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        try:
            backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=timedelta(seconds=rank_timeout(None)))
        except RuntimeError as error:
            meeting = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
            raise RankError(
                f"rank {os.environ['RANK']} on {socket.gethostname()} could not join the other ranks at {meeting}: "
                f"{str(error).splitlines()[0]}. {GLOO_HINT}"
            ) from error
        self._patient = dist.new_group(timeout=_LONGEST, backend="gloo")  # waits for ranks that have more to do
        self.count = dist.get_world_size()
        self.leads = dist.get_rank() == 0
        self.hosts = len(set(self._gather(socket.gethostname())))

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Runs ``function(*args)`` and returns the values of all ranks; raises on all with the errors of those that
        failed."""
        try:
            mine = Outcome(value=function(*args))
        except Exception as error:
            mine = Outcome(error=f"{type(error).__name__}: {error}")
        outcomes = self._gather(mine)
        failed = [f"rank {rank}: {outcome.error}" for rank, outcome in enumerate(outcomes) if outcome.error]
        if failed:
            raise SuperOffloadError("\n".join(failed))
        return [outcome.value for outcome in outcomes]

    def _gather(self, value: Any) -> list[Any]:
        told: list[Any] = [None] * self.count
        try:
            dist.all_gather_object(told, value, group=self._patient)
        except RuntimeError as error:
            why = str(error).splitlines()[0]
            raise RankError(f"another rank has ended; its own output says why [{why}]") from error
        return told

    def __enter__(self) -> LaunchedRanks:
        return self

    def __exit__(self, *exception: object) -> None:
        dist.destroy_process_group()
