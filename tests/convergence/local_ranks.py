"""Runs several ranks on this machine, over gloo and the loopback device, for tests.convergence and other tests."""

from __future__ import annotations

import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from superoffload.errors import SuperOffloadError

# The process that ranks are forked from loads these once, so that a rank starts in a fraction of a second, and has
# little memory of its own. (New torch optimizers load torch._dynamo, which takes longer than all else.)
_TORCH = ["torch", "torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo"]
PRELOAD = [*_TORCH, "superoffload.checkpoints", "tests.support.rank_processes", "tests.convergence.frozen"]
_GRACE = 5.0


@dataclass(frozen=True)
class Outcome:
    """Holds what a rank's function returned, or its error's text: "lost, with exit code N" if the process ended."""

    value: Any = None
    error: str = ""


class LocalRanks:
    """Runs one function after the other in several processes, the same in each. Close it, or use ``with``."""

    def __init__(self, count: int, *, timeout: float = 60.0, init: bool = True) -> None:
        self.count = count
        self._folder = tempfile.TemporaryDirectory(prefix="superoffload-ranks-")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._pipes: list[Any] = []
        self.processes: list[Any] = []
        store = str(Path(self._folder.name) / "store") if init else ""
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, count, store, timeout), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, limit: float = 300.0) -> list[Any]:
        """Runs ``function(*args)`` on every rank and returns the values; raises with the errors of all failed ranks."""
        outcomes = self.outcomes(function, *args, limit=limit)
        failed = [f"rank {rank}: {outcome.error}" for rank, outcome in enumerate(outcomes) if outcome.error]
        if failed:
            self.close()
            raise SuperOffloadError("\n".join(failed))
        return [outcome.value for outcome in outcomes]

    def outcomes(self, function: Callable[..., Any], *args: Any, limit: float = 300.0) -> list[Outcome]:
        """Runs ``function(*args)`` and returns errors too; ends a rank that does not answer within ``limit``."""
        self.start(function, *args)
        return self.collect(limit)

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        for pipe in self._pipes:
            pipe.send((function, args))

    def collect(self, limit: float = 300.0, ranks: Iterable[int] | None = None) -> list[Outcome]:
        """Returns what ``ranks`` (default: all) have answered; ends one that does not answer within ``limit``."""
        deadline = time.monotonic() + limit
        outcomes = []
        for rank in range(self.count) if ranks is None else ranks:
            pipe, process = self._pipes[rank], self.processes[rank]
            try:
                if pipe.poll(max(0.0, deadline - time.monotonic())):
                    outcomes.append(pipe.recv())
                else:
                    process.kill()
                    outcomes.append(Outcome(error=f"no answer within {limit:g} s"))
            except (EOFError, OSError):
                process.join(_GRACE)
                outcomes.append(Outcome(error=f"lost, with exit code {process.exitcode}"))
        return outcomes

    def close(self) -> None:
        """Ends the processes, by force where they do not end themselves."""
        for pipe in self._pipes:
            try:
                pipe.send(None)
            except OSError:
                continue
        deadline = time.monotonic() + _GRACE
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _serve(pipe: Any, rank: int, count: int, store: str, timeout: float) -> None:
    """Runs a rank's functions until its pipe says that there are no more."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(count)
    import torch
    import torch.distributed as dist

    faulthandler.enable()  # says where a crash was
    torch.set_num_threads(1)
    if store:
        wait = timedelta(seconds=timeout)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=wait)
    while (work := _received(pipe)) is not None:
        function, args = work
        try:
            outcome = Outcome(value=function(*args))
        except BaseException as error:
            outcome = Outcome(error=f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        pipe.send(outcome)
    pipe.close()
    os._exit(0)  # peers may have ended, and the teardown of process groups waits for them


def _received(pipe: Any) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        return None
