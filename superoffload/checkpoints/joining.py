"""Joins the parts of all ranks into one checkpoint; the ranks tell each other by files in its folder."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from superoffload.checkpoints import folder as folders
from superoffload.checkpoints.contents import Named
from superoffload.checkpoints.part_files import Written, file_name
from superoffload.errors import DiskError, RankError

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5  # seconds between two looks; hundreds of ranks may watch one folder


def hand_in(written: Written, named: Named, writing: Path) -> None:
    """Tells the first rank that this rank's part is on the disk."""
    name = file_name(named.rank)
    folders.write_durably(writing / f".{name}.part", json.dumps(written.report).encode())
    os.rename(writing / f".{name}.part", writing / f".{name}.json")


def tell_failure(writing: Path, rank: int) -> None:
    """Tells the first rank not to wait for this rank's part, by an empty file, which often fits on a full disk."""
    with suppress(OSError):
        (writing / f".{file_name(rank)}.failed").touch()


def complete(named: Named, writing: Path, final: Path, timeout: float) -> None:
    """Waits on the first rank until all others have written their part, then gives the folder its name."""
    files: dict[str, Any] = {}
    tensors: dict[str, list[Any]] = {}
    deadline = time.monotonic() + timeout
    pauses = _pauses()
    for rank in named.ranks:
        path = writing / f".{file_name(rank)}.json"
        while not path.exists():
            if path.with_suffix(".failed").exists():
                raise RankError(
                    f"save(): {named.called(rank)} could not write its part of {final}; its output says why"
                )
            if time.monotonic() > deadline:
                raise RankError(
                    f"save(): {named.called(rank)} has not written its part of {final} within {timeout:g} s"
                )
            with suppress(OSError):
                os.utime(writing)  # tells the ranks that wait for the name that this one is alive
            next(pauses)
        report = json.loads(path.read_bytes())
        path.unlink()
        files.update(report["files"])
        for name, piece in report["tensors"].items():
            tensors.setdefault(name, []).append(piece)
    folders.finish(writing, final, {"ranks": len(named.ranks), "files": files, "tensors": tensors})


def wait_until_named(written: Written, named: Named, writing: Path, final: Path, timeout: float) -> None:
    """Waits on the other ranks until the folder with their part has its name and is on the disk.

    They wait as long as the first rank gives signs of life. Their part is already handed in, so an error here does not
    mean that the checkpoint fails; the first rank decides that.
    """
    leads, name = writing / file_name(named.ranks[0]), file_name(named.rank)
    signs: list[int] | None = None
    deadline, absent, pauses = 0.0, 0, _pauses()
    while True:
        there = _there(writing, final)
        if writing.name in there:
            absent = 0
        elif final.name in there and _begins_with(final, name, written.header):
            break
        else:
            absent += 1  # a rename may be under way: look twice
        if absent > 1:
            raise gave_up(final, "another save has taken this name") if final.name in there else gave_up(final)
        seen = _times_of(writing, leads)
        if seen != signs:
            signs, deadline = seen, time.monotonic() + timeout
        if time.monotonic() > deadline:
            raise RankError(
                f"save(): {final}: no sign of life of the first rank within {timeout:g} s; see its output. If it goes "
                "on, the checkpoint may still be finished"
            )
        next(pauses)
    folders.confirm(final)


def gave_up(final: Path, why: str = "the first rank gave up") -> RankError:
    return RankError(f"save(): {final}: {why}; see the first rank's output")


def _pauses() -> Iterator[None]:
    seconds = _FIRST_PAUSE
    while True:
        time.sleep(seconds)
        seconds = min(seconds * 1.1, _LONGEST_PAUSE)
        yield


def _there(writing: Path, final: Path) -> set[str]:
    """Returns which of the two names exist, from a listing: NFS may remember for a while that a name was absent."""
    try:
        return {writing.name, final.name} & set(os.listdir(final.parent))
    except PermissionError:  # the folder can be written but not read
        return {path.name for path in (writing, final) if path.exists()}
    except OSError:
        return {writing.name}  # unknown: go on until the deadline


def _begins_with(final: Path, name: str, header: bytes) -> bool:
    """Returns whether the file is this save's; the manifest would tell too, but may have hundreds of MB."""
    try:
        with open(final / name, "rb") as file:
            return file.read(len(header)) == header
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise DiskError(
            error.errno, f"{final}: written, but {name} could not be read ({error.strerror}); check the disk"
        ) from error


def _times_of(*paths: Path) -> list[int]:
    times = []
    for path in paths:
        with suppress(OSError):
            times.append(os.stat(path).st_mtime_ns)
    return times
