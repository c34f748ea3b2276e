"""A group of ranks on loopback that stays alive and runs one case after the other."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

# DeepSpeed is loaded once, in a process that ranks are forked from; not in the one that tests without DeepSpeed have
# their ranks from.
_SERVER = multiprocessing.forkserver.ForkServer()
_SERVER.set_forkserver_preload(
    [
        "torch._dynamo",
        "torch._inductor.compile_fx",
        "tests.support.deepspeed.rank_setup",
        "deepspeed.runtime.zero.stage3",
    ]
)


ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "DEEPSPEED_LOG_LEVEL": "error",
    "LOCAL_SIZE": "1",  # of devices, as without it; DeepSpeed would run numactl to count them in every reduction
}
# For programs that tests start and that use DeepSpeed.
QUICK_KERNELS = str(Path(__file__).with_name("quick_kernels"))


class RankError(AssertionError):
    """A case raised on a rank; the message has its traceback."""


class Ranks:
    """``world`` processes; ``run(case, ...)`` calls ``case`` on all of them and returns their results in rank order.

    ``hosts``: a network namespace for each (tests/support/two_hosts.py). ``timeout``: seconds, of DeepSpeed's
    collectives.
    """

    def __init__(self, world: int, hosts: tuple[str, ...] = (), timeout: float = 60.0) -> None:
        context = multiprocessing.get_context("forkserver")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, world, port, hosts, timeout))
            _start(process)
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


def _start(process: ForkServerProcess) -> None:
    module = multiprocessing.forkserver
    with (
        mock.patch.object(module, "connect_to_new_process", _SERVER.connect_to_new_process),
        mock.patch.dict(os.environ, ENVIRONMENT),
    ):
        process.start()


def _serve(pipe: Connection, rank: int, world: int, port: int, hosts: tuple[str, ...], timeout: float) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    from tests.support.deepspeed import rank_setup

    if hosts:
        from tests.support.two_hosts import enter

        enter(hosts, rank)
    rank_setup.start(timeout)
    while True:
        try:
            case, args, kwargs = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send((True, case(*args, **kwargs)))
        except BaseException:
            pipe.send((False, f"rank {rank}:\n{traceback.format_exc()}"))
    sys.stdout.flush()
    os._exit(0)  # no collective at exit: the other rank may be gone
