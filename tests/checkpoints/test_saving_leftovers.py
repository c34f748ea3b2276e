"""What saves have left behind: swept only where its process has provably ended, whichever host looks."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from superoffload import checkpoints
from superoffload.checkpoints import leftovers, writing
from tests.support.saved_runs import break_locks

HIDDEN = ".writing-{host}-{pid}-{start}-{namespace}-{boot}-0123456789ab"


def hidden(root: Path, **changed: Any) -> Path:
    """A folder as another save has left it: by default of a process that is gone, on this host."""
    here = leftovers._this_process()
    values = {"host": "node7", "pid": 1 << 29, "start": 5, "namespace": here.namespace, "boot": here.boot, **changed}
    path = root / HIDDEN.format(**values)
    path.mkdir(parents=True)
    (path / "rank-00000.safetensors").write_bytes(b"half of it")
    return path


def of_another_boot(root: Path, start: int, host: str = "", *, written: float = 1.0, lock: bool = False) -> Path:
    """Of this ``host`` by default. ``written``: when its file was, seconds since 1970."""
    path = hidden(root, start=start, boot="f" * 32, host=host or leftovers._host())
    if lock:
        locked(path)
    for one in (*path.iterdir(), path):
        os.utime(one, (written, written))
    return path


def locked(path: Path) -> Path:
    (path / leftovers.LOCK).touch()
    return path


@pytest.fixture(scope="module")
def sleeper() -> Iterator[Any]:
    """A process that runs, and one that is a zombie."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        gone = subprocess.Popen([sys.executable, "-c", ""])
        while Path(f"/proc/{gone.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        yield process, gone
        process.kill()
        gone.wait()


def test_only_what_is_provably_left_behind_is_swept(tmp_path: Path, sleeper: Any, reader: Any) -> None:
    alive, zombie = sleeper
    start = leftovers._stat(alive.pid)[1]
    other = {"namespace": 7}
    swept = [
        hidden(tmp_path),
        hidden(tmp_path, pid=alive.pid, start=start - 1),  # its number was given to another process
        hidden(tmp_path, pid=zombie.pid, start=leftovers._stat(zombie.pid)[1]),
        hidden(tmp_path, pid=os.getpid(), start=leftovers._this_process().start),  # ours, but given up
        locked(hidden(tmp_path, start=6, **other)),  # another container's, and its lock is free
        of_another_boot(tmp_path, 1),  # of this system, an earlier one
        of_another_boot(tmp_path, 2, lock=True),
    ]
    removing = tmp_path / swept[0].name.replace("writing", "removing")
    removing.mkdir()
    stays = [
        hidden(tmp_path, pid=alive.pid, start=start),
        hidden(tmp_path, start=7, **other),  # another container's: nothing tells
        locked(hidden(tmp_path, start=8, **other)),  # the same, with a lock that is held (below)
        locked(hidden(tmp_path, start=9)),  # a process that seems gone and holds its lock
        hidden(tmp_path, start=1, boot="0" * 32),  # made where /proc says nothing
        of_another_boot(tmp_path, 3, "node8"),  # an NFS client's, for instance, whose locks its server may not see
        of_another_boot(tmp_path, 4, written=time.time() - 2),  # a container's that has this host's name
        of_another_boot(tmp_path, 5, lock=True),  # held by lockf(), as an NFS server sees flock() of a client
    ]
    foreign = [tmp_path / name for name in (".writing-notes", ".removing-old", ".writing-step-1-0123456789ab", ".x")]
    for path in foreign:
        path.mkdir()
    link = tmp_path / hidden(tmp_path / "elsewhere", start=3).name
    link.symlink_to(tmp_path / "elsewhere" / link.name)
    with held_by_lockf(stays[-1] / leftovers.LOCK), ExitStack() as held:
        for path in stays[2:4]:
            fcntl.flock(held.enter_context(open(path / leftovers.LOCK)), fcntl.LOCK_EX)
        checkpoints.save(tmp_path / "step-1", *reader)
    assert not [path for path in (*swept, removing) if path.exists()]
    assert all((path / "rank-00000.safetensors").exists() for path in stays)
    assert all(path.exists() for path in (*foreign, link))
    checkpoints.save(tmp_path / "step-2", *reader)
    assert [path.exists() for path in stays] == [True, True, False, False, True, True, True, False]


@contextmanager
def held_by_lockf(path: Path) -> Iterator[None]:
    """By another process, since a process is not in its own way."""
    program = (
        f"import fcntl; file = open({str(path)!r}, 'r+'); fcntl.lockf(file, fcntl.LOCK_EX); print(flush=True); input()"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"\n"
        yield
        process.kill()


def test_what_was_written_lately_is_not_of_an_earlier_boot(tmp_path: Path) -> None:
    """Also before this system was started: clocks differ, and a save may wait for another rank."""
    booted = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
    older = min(float(booted.split()[1]), time.time() - leftovers._LONG_AGO)
    for start, (written, over) in enumerate([(older + 5, False), (older - 5, True)]):
        assert leftovers._is_left_behind(of_another_boot(tmp_path, start, written=written)) is over
    path = of_another_boot(tmp_path, 2)
    os.utime(path / "rank-00000.safetensors")  # the folder's own time does not change with its files
    assert not leftovers._is_left_behind(path)


def test_a_folder_is_locked_until_it_has_its_name(tmp_path: Path, reader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed then leaves a lock in a finished checkpoint, which disturbs no reader."""
    rename = os.rename

    def watched(source: Any, target: Any) -> None:
        if Path(target).name == "step-1":
            assert leftovers._is_held(Path(source) / leftovers.LOCK)
        rename(source, target)

    monkeypatch.setattr(os, "rename", watched)
    checkpoints.save(tmp_path / "step-1", *reader)
    assert sorted(os.listdir(tmp_path / "step-1")) == ["manifest.json", "rank-00000.safetensors", "state.pt"]
    locked(tmp_path / "step-1")
    assert checkpoints.latest(tmp_path) == tmp_path / "step-1"
    checkpoints.load(tmp_path / "step-1", *reader)
    checkpoints.save(tmp_path / "step-2", *reader, keep=1)
    assert os.listdir(tmp_path) == ["step-2"]


@pytest.mark.parametrize("locks", ["refused", "no-op"])
def test_without_locks_that_work_other_hosts_folders_stay(
    locks: str, tmp_path: Path, reader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", fcntl.flock)  # put back at the end
    break_locks(locks)
    stays = [hidden(tmp_path, boot="e" * 32), hidden(tmp_path, namespace=7)]
    gone = hidden(tmp_path)
    seen: list[str] = []
    rename = os.rename

    def watched(source: Any, target: Any) -> None:
        seen.extend(path.name for path in Path(source).glob(".lock*"))
        rename(source, target)

    monkeypatch.setattr(os, "rename", watched)
    checkpoints.save(tmp_path / "step-1", *reader)
    assert not seen  # a lock that means nothing is not shown to others
    assert all(path.exists() for path in stays) and not gone.exists()


def test_a_process_killed_while_it_saves_leaves_a_lock_that_is_free(tmp_path: Path, reader: Any) -> None:
    """As another container sees it, which cannot know the process."""
    folder = leftovers.claim(tmp_path)
    child = os.fork()
    if child == 0:
        folder.mkdir()
        leftovers.lock(folder)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    leftovers.release(folder)
    here = leftovers._this_process()
    renamed = folder.rename(tmp_path / HIDDEN.format(host="node7", pid=1, start=2, namespace=7, boot=here.boot))
    assert leftovers._is_held(renamed / leftovers.LOCK) is False
    checkpoints.save(tmp_path / "step-1", *reader)
    assert not renamed.exists()


def test_a_sweep_sees_a_folder_of_this_process_at_once(tmp_path: Path) -> None:
    """Between the making of a name, the folder and its lock other threads may sweep."""
    folder = leftovers.claim(tmp_path)
    folder.mkdir()
    leftovers.sweep(tmp_path)
    assert folder.exists()
    leftovers.lock(folder)
    leftovers.sweep(tmp_path)
    assert leftovers._is_held(folder / leftovers.LOCK)
    leftovers.release(folder)
    leftovers.sweep(tmp_path)
    assert not folder.exists()


def test_a_folder_that_is_given_up_goes_at_once(tmp_path: Path) -> None:
    """A file of another rank that comes while it is emptied would keep it there, and the other ranks waiting for it.
    It may not be renamed."""
    folder = writing.begin(tmp_path / "step-1")
    remove = os.rmdir

    def late(path: Any, **options: Any) -> None:
        with suppress(FileNotFoundError):
            (folder / "rank-00001.safetensors").write_bytes(b"half of it")
        remove(path, **options)

    with mock.patch("os.rmdir", late):
        writing.give_up(folder)
    assert os.listdir(tmp_path) == []
    folder = writing.begin(tmp_path / "step-1")
    with mock.patch("os.rename", side_effect=PermissionError(1, "Operation not permitted")):
        writing.give_up(folder)
    assert os.listdir(tmp_path) == []
