"""A group of ranks on loopback that stays alive and runs one case after the other."""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class RankError(AssertionError):
    """A case raised on a rank; the message has its traceback."""


class Ranks:
    """``world`` processes; ``run(case, ...)`` calls ``case`` on all of them and returns their results in rank order."""

    def __init__(self, world: int) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, world, port))
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def run(self, case: Callable[..., Any], /, *args: Any, timeout: float = 120.0, **kwargs: Any) -> list[Any]:
        """Raises RankError with every rank's traceback, or when a rank does not answer in time."""
        for pipe in self._pipes:
            pipe.send((case, args, kwargs))
        ends = time.monotonic() + timeout
        results: list[Any] = []
        errors: list[Any] = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(0.0, ends - time.monotonic())):
                self.close()
                raise RankError(f"rank {rank}: no answer from {case.__name__} within {timeout:g} s")
            good, value = pipe.recv()
            (results if good else errors).append(value)
        if errors:
            raise RankError("\n".join(errors))
        return results

    def close(self) -> None:
        """Ends the processes that this object started."""
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join(5)


def _serve(pipe: Connection, rank: int, world: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        DS_ACCELERATOR="cpu",
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
        OMP_WAIT_POLICY="PASSIVE",
        DEEPSPEED_LOG_LEVEL="error",
    )
    from tests.deepspeed import rank_setup

    rank_setup.start()
    first = True
    while True:
        try:
            case, args, kwargs = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send((True, case(*args, **kwargs)))
        except BaseException:
            pipe.send((False, f"rank {rank}:\n{traceback.format_exc()}"))
        if first:  # DeepSpeed collects garbage whenever it makes an engine; there is none among what was imported
            gc.collect()
            gc.freeze()
            first = False
    sys.stdout.flush()
    os._exit(0)  # no collective at exit: the other rank may be gone
