"""Tells hidden folders that a save is still writing from those that its process has left behind for ever.

A hidden folder's name says which process made it: host (for people), process id, start time, process id namespace and
boot. So it has an owner from the moment in which it exists. Where the name alone proves nothing (another container on
this machine), a lock that the owner holds does. Another boot may be an earlier one of this system, or another system
that runs now: an NFS client, a virtual machine, a container with a boot id of its own. What is not provably left behind
stays: docs/checkpoints.md says how to remove it by hand.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

LOCK = ".lock"
_NAME = re.compile(
    r"\.(?P<kind>writing|removing)-(?P<host>[\w.-]*)-(?P<pid>\d{1,9})-(?P<start>\d{1,20})-(?P<namespace>\d{1,20})"
    r"-(?P<boot>[0-9a-f]{32})-[0-9a-f]{12}",
    re.ASCII,
)
_LONG_AGO = 3600.0  # seconds: more than clocks of hosts that share a disk differ, and than a save writes nothing
_UNKNOWN = "0" * 32
_being_written: dict[str, int | None] = {}  # by this process: names, and the locks that it holds


class _Owner(NamedTuple):
    pid: int
    start: int  # clock ticks from boot
    namespace: int
    boot: str


def claim(parent: Path) -> Path:
    """A name in ``parent`` for what this process is going to write; ``lock`` may follow, ``release`` must."""
    path = parent / _new_name("writing")
    _being_written[path.name] = None  # before it exists: another thread of this process may sweep
    return path


def doomed(path: Path) -> Path:
    """The name under which ``path`` is removed. Whichever process comes first completes the removal."""
    return path.parent / _new_name("removing")


def lock(folder: Path) -> None:
    """Puts a lock into a claimed folder, where the file system has locks that work."""
    part = folder / f"{LOCK}.part"
    with suppress(OSError):  # without one, only the name tells
        handle = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        _being_written[folder.name] = handle
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_held(part):  # otherwise a second one was granted: locks mean nothing here
                os.rename(part, folder / LOCK)  # it is held before it can be seen
        finally:
            part.unlink(missing_ok=True)


def release(path: Path, named: Path | None = None) -> None:
    """After it was removed, or got the name ``named``: the lock stays in it until then.

    A lock that is left in a finished checkpoint, by a process that was killed here, does no harm: its manifest does not
    list it.
    """
    handle = _being_written.pop(path.name, None)
    if handle is not None:
        os.close(handle)
    if named is not None:
        with suppress(OSError):
            (named / LOCK).unlink()


def sweep(parent: Path) -> None:
    """Removes what saves have provably left behind in ``parent``."""
    with suppress(OSError), os.scandir(parent) as entries:
        left = [Path(entry.path) for entry in entries if _NAME.fullmatch(entry.name) and not entry.is_symlink()]
        for path in left:
            if _is_left_behind(path):
                remove(path)


def remove(path: Path) -> None:
    """As far as that is possible; the next sweep goes on with what is left."""
    with suppress(OSError):
        path.unlink() if path.is_file() else shutil.rmtree(path, ignore_errors=True)


def _is_left_behind(path: Path) -> bool:
    name = _NAME.fullmatch(path.name)
    if name is None or path.name in _being_written:
        return False
    if name["kind"] == "removing":
        return True
    held = _is_held(path / LOCK)
    owner = _Owner(int(name["pid"]), int(name["start"]), int(name["namespace"]), name["boot"])
    here = _this_process()
    if held or _UNKNOWN in (owner.boot, here.boot):
        return False
    if owner.boot != here.boot:
        return name["host"] == _host() and _was_over_before_boot(path)
    if owner.namespace != here.namespace:
        return held is False
    return owner == here or not _runs(owner)


def _new_name(kind: str) -> str:
    owner = _this_process()
    return f".{kind}-{_host()}-{owner.pid}-{owner.start}-{owner.namespace}-{owner.boot}-{uuid.uuid4().hex[:12]}"


def _host() -> str:
    return re.sub(r"[^\w.-]", "_", os.uname().nodename, flags=re.ASCII)


def _this_process() -> _Owner:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
        _, start, _ = _stat(os.getpid())
        return _Owner(os.getpid(), start, os.stat("/proc/self/ns/pid").st_ino, boot)
    except (OSError, ValueError, IndexError):
        return _Owner(os.getpid(), 0, 0, _UNKNOWN)


def _runs(owner: _Owner) -> bool:
    """In this namespace. A process of which one thread still runs does."""
    try:
        os.kill(owner.pid, 0)  # also sees what /proc hides from other users
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    try:
        state, start, threads = _stat(owner.pid)
    except (OSError, ValueError, IndexError):
        return True  # it may have ended just now: the next sweep
    return start == owner.start and not (state in "ZX" and threads <= 1)


def _stat(pid: int) -> tuple[str, int, int]:
    """State, start time and number of threads; proc(5)."""
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], int(fields[19]), int(fields[17])


def _is_held(path: Path) -> bool | None:
    """Whether another open file holds the lock; None where that cannot be told.

    Asked for in both ways: flock() of an NFS client is a lock of lockf() on its server.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(handle, fcntl.LOCK_UN)  # on an NFS client the two are in each other's way
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(handle)


def _was_over_before_boot(path: Path) -> bool:
    """Nothing in it was written since this system was started, and long ago, whichever clock has dated it."""
    try:
        booted = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
        entries = [*path.iterdir()] if path.is_dir() else []
        newest = max(os.lstat(one).st_mtime for one in (path, *entries))
        return newest < min(float(booted.split()[1]), time.time() - _LONG_AGO)
    except (OSError, ValueError, IndexError, StopIteration):
        return False
