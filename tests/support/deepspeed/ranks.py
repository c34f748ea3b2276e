"""A group of ranks on loopback, with DeepSpeed, that stays alive and runs one case after the other."""

from __future__ import annotations

import multiprocessing.forkserver
import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from tests.convergence.local_ranks import LocalRanks

# DeepSpeed is loaded once, in a process that ranks are forked from; not in the one that tests without DeepSpeed have
# their ranks from.
_SERVER = multiprocessing.forkserver.ForkServer()
_SETUP = "tests.support.deepspeed.rank_setup"
_SERVER.set_forkserver_preload(["torch._dynamo", "torch._inductor.compile_fx", _SETUP, "deepspeed.runtime.zero.stage3"])
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
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
    """``world`` processes. ``hosts``: a network namespace for each (tests/support/two_hosts.py). ``timeout``: seconds,
    of DeepSpeed's collectives."""

    def __init__(self, world: int, hosts: tuple[str, ...] = (), timeout: float = 60.0) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        connect = mock.patch("multiprocessing.forkserver.connect_to_new_process", _SERVER.connect_to_new_process)
        with connect, mock.patch.dict(os.environ, ENVIRONMENT):
            self._local = LocalRanks(world, init=False)
        self.processes, self.close = self._local.processes, self._local.close
        self._local.start(_begin, port, hosts, timeout)
        self._begun = False

    def run(self, case: Callable[..., Any], /, *args: Any, timeout: float = 120.0, **kwargs: Any) -> list[Any]:
        """Raises RankError with every rank's traceback; the ranks go on, unless one did not answer in time."""
        if not self._begun:
            self._begun = True
            self._values(self._local.collect(timeout))
        return self._values(self._local.outcomes(partial(case, *args, **kwargs), limit=timeout))

    def _values(self, outcomes: list[Any]) -> list[Any]:
        errors = [f"rank {rank}: {one.error}" for rank, one in enumerate(outcomes) if one.error]
        if any("no answer within" in error for error in errors):
            self.close()
        if errors:
            raise RankError("\n".join(errors))
        return [one.value for one in outcomes]


def _begin(port: int, hosts: tuple[str, ...], timeout: float) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    from tests.support.deepspeed import rank_setup

    if hosts:
        from tests.support.two_hosts import enter

        enter(hosts, int(os.environ["RANK"]))
    rank_setup.start(timeout)
