"""Tells hidden folders that a save is still writing from those that an ended process left behind.

A hidden folder's name says which process made it: host (for people), process id, start time, process id namespace and
boot. So it has an owner from the moment it exists. Where the name proves nothing (another container on this machine), a
lock that the owner holds does. A different boot id may be an earlier boot of this system, or another running system: an
NFS client, a virtual machine, a container with a boot id of its own. A folder that is not provably left behind stays:
docs/checkpoints.md says how to remove it by hand.
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
_LONG_AGO = 3600.0  # seconds; exceeds clock differences of hosts that share a disk, and pauses of a save
_UNKNOWN = "0" * 32
_being_written: dict[str, int | None] = {}  # by this process: names, and the locks held for them


class _Owner(NamedTuple):
    pid: int
    start: int  # clock ticks from boot
    namespace: int
    boot: str


def claim(parent: Path) -> Path:
    """Returns a new name in ``parent`` for this process to write to; ``lock`` may follow, ``release`` must."""
    path = parent / _new_name("writing")
    _being_written[path.name] = None  # before the folder exists: another thread of this process may sweep
    return path


def doomed(path: Path) -> Path:
    """Returns the name under which ``path`` is removed; any process may complete the removal."""
    return path.parent / _new_name("removing")


def lock(folder: Path) -> None:
    """Puts a lock into a claimed folder if the file system's locks work."""
    part = folder / f"{LOCK}.part"
    with suppress(OSError):  # without a lock, only the name tells
        handle = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        _being_written[folder.name] = handle
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_held(part):  # otherwise a second lock was granted: locks mean nothing here
                os.rename(part, folder / LOCK)  # the lock is held before other processes see it
        finally:
            part.unlink(missing_ok=True)


def release(path: Path, named: Path | None = None) -> None:
    """Ends a claim after ``path`` was removed or renamed to ``named``, where the lock stays until then.

    A lock that a killed process leaves in a finished checkpoint does no harm: its manifest does not list it.
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
    """Removes as much of ``path`` as it can; the next sweep goes on with the rest."""
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
    """Returns whether the owner, in this process id namespace, runs; it does while one of its threads runs."""
    try:
        os.kill(owner.pid, 0)  # also sees processes that /proc hides from other users
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    try:
        state, start, threads = _stat(owner.pid)
    except (OSError, ValueError, IndexError):
        return True  # it may just have ended: leave it to the next sweep
    return start == owner.start and not (state in "ZX" and threads <= 1)


def _stat(pid: int) -> tuple[str, int, int]:
    """Returns state, start time and number of threads, as in proc(5)."""
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], int(fields[19]), int(fields[17])


def _is_held(path: Path) -> bool | None:
    """Returns whether another open file holds the lock; None if that cannot be told.

    Tries both kinds of lock: flock() of an NFS client is a lock of lockf() on its server.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(handle, fcntl.LOCK_UN)  # on an NFS client the two locks exclude each other
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(handle)


def _was_over_before_boot(path: Path) -> bool:
    """Returns whether all was written before this boot and long ago, by this host's clock or the file server's."""
    try:
        booted = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
        entries = [*path.iterdir()] if path.is_dir() else []
        newest = max(os.lstat(one).st_mtime for one in (path, *entries))
        return newest < min(float(booted.split()[1]), time.time() - _LONG_AGO)
    except (OSError, ValueError, IndexError, StopIteration):
        return False
