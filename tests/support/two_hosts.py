"""Two hosts on this machine: network namespaces with a link between them, which ranks enter, and which can be cut,
slow or lossy. They have host names of their own.

Both ends have the same name and the same addresses in every pair, so that any number of pairs can be there at once.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from datetime import timedelta

import torch.distributed as dist

DEVICE = "wire"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
HOSTS = ("host-a", "host-b")
_CLONE_NEWNET, _CLONE_NEWUTS = 0x40000000, 0x04000000
_NOWHERE = "02:00:00:00:00:99"  # has no host: what is sent to it is gone, without an answer
_numbers = itertools.count()


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


_ip = functools.partial(_run, "ip")


@functools.cache
def missing_for_namespaces() -> str | None:
    """Why tests with network namespaces cannot run here; None where they can."""
    if shutil.which("ip") is None:
        return "needs ip: apt-get install iproute2"
    try:
        with Link():
            return None
    except subprocess.CalledProcessError as error:
        return f"needs to make network namespaces, as root: {error.stderr.strip()}"


class Link:
    """Use ``with``. ``names``: of the namespaces, by host."""

    def __init__(self) -> None:
        number = next(_numbers)
        self.names = tuple(f"superoffload-{os.getpid()}-{number}-{host}" for host in range(2))

    def __enter__(self) -> Link:
        try:
            for name in self.names:
                _ip("netns", "add", name)
            first, second = self.names
            _ip("link", "add", "name", DEVICE, "netns", first, "type", "veth", "peer", "name", DEVICE, "netns", second)
            for name, address in zip(self.names, ADDRESSES, strict=True):
                _ip("-n", name, "link", "set", "lo", "up")
                _ip("-n", name, "address", "add", f"{address}/24", "dev", DEVICE)
                _ip("-n", name, "link", "set", DEVICE, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def enter(names: tuple[str, ...], host: int) -> None:
    """This thread, and those that it starts from now on, are on that host."""
    libc = ctypes.CDLL(None, use_errno=True)
    namespace = os.open(f"/run/netns/{names[host]}", os.O_RDONLY)
    try:
        if libc.setns(namespace, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns({names[host]})")
        if libc.unshare(_CLONE_NEWUTS) != 0:
            raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWUTS)")
    finally:
        os.close(namespace)
    socket.sethostname(HOSTS[host])
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = ADDRESSES[0], "29500"


def host_of(rank: int) -> int:
    return rank * len(HOSTS) // int(os.environ["WORLD_SIZE"])


def join_world(names: tuple[str, ...], timeout: float) -> int:
    """The first half of the ranks is on the first host, and with it the store of torch.distributed."""
    rank = int(os.environ["RANK"])
    enter(names, host_of(rank))
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    return rank


def cut(names: tuple[str, ...], how: str, host: int) -> None:
    """``down``: the device of that host goes down. ``silent``: nothing arrives any more on either, and nothing shows
    it, as when a switch fails."""
    if how == "down":
        _ip("-n", names[host], "link", "set", DEVICE, "down")
        return
    for name, address in zip(names, reversed(ADDRESSES), strict=True):
        _ip("-n", name, "neighbor", "replace", address, "lladdr", _NOWHERE, "dev", DEVICE, "nud", "permanent")


def slow(names: tuple[str, ...], megabits: int, queue: int) -> None:
    """Both directions carry so many megabits a second. What finds more than ``queue`` bytes waiting is dropped."""
    for name in names:
        shape = ("root", "tbf", "rate", f"{megabits}mbit", "burst", "2kb", "limit", str(queue))
        _run("tc", "-n", name, "qdisc", "replace", "dev", DEVICE, *shape)


def dropped(names: tuple[str, ...]) -> int:
    """How many packets the slow link has dropped in both directions."""
    shown = (_run("tc", "-n", name, "-s", "qdisc", "show", "dev", DEVICE) for name in names)
    return sum(int(count) for one in shown for count in re.findall(r"dropped (\d+)", one))


def on_host(names: tuple[str, ...], host: int, *command: str, **environment: str) -> subprocess.Popen[str]:
    """Starts Python on a host, with these arguments."""
    start = (
        "import json, os, sys; from tests.support.two_hosts import enter; enter(sys.argv[3:], int(sys.argv[2]));"
        "os.environ.update(json.loads(sys.argv[1])[1]); os.execv(sys.executable, json.loads(sys.argv[1])[0])"
    )
    program = json.dumps([[sys.executable, *command], environment])
    arguments = [sys.executable, "-c", start, program, str(host), *names]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
