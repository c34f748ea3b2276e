"""Writes a checkpoint's folder, which exists whole or not at all."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from superoffload.checkpoints import leftovers
from superoffload.checkpoints.folder import LARGEST_MANIFEST, MANIFEST, check_file, finished, manifest_text
from superoffload.checkpoints.manifest import check_content
from superoffload.errors import ArgumentError, DiskError, StateError

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_FOR_FOLDERS = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF)  # on some FUSE, CIFS and 9p


def path_of(folder: str | os.PathLike[str]) -> Path:
    """Returns the absolute path, or raises ArgumentError; does not touch the disk, so that all ranks agree."""
    try:
        final = Path(os.path.abspath(os.fspath(folder)))
        if b"\0" in os.fsencode(final):
            raise ValueError("it contains a NUL character")
    except (TypeError, ValueError, OSError) as error:
        raise ArgumentError(f"folder={folder!r}: no path of a folder ({error}); name one that can be made") from error
    return final


def begin(final: Path) -> Path:
    """Makes a hidden folder beside ``final`` to write into, and removes what earlier saves provably left behind."""
    try:
        if os.path.lexists(final):  # a dangling link is in the way too
            raise _exists(final)
        make_parents(final)
        leftovers.sweep(final.parent)
        folder = leftovers.claim(final.parent)
        try:
            folder.mkdir()
            leftovers.lock(folder)
        except BaseException:
            give_up(folder)
            raise
    except OSError as error:
        raise _cannot_be_made(final, error) from error
    return folder


def make_parents(final: Path) -> None:
    """Makes missing parents and syncs them to the disk: losing a folder loses the checkpoints in it."""
    ancestors = list(final.parents)
    missing = ancestors[: next((i for i, path in enumerate(ancestors) if path.is_dir()), 0)]
    for path in (final, *missing):
        with suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(ancestors[len(missing)] / path.name)  # refuses too long a name before any folder is made
    for path in reversed(missing):
        path.mkdir(exist_ok=True)  # another process may have been faster
        sync_folder(path.parent)


def _cannot_be_made(final: Path, error: OSError) -> ArgumentError | DiskError:
    if error.errno in (*_NO_SPACE, errno.EIO, errno.ESTALE):
        return not_written(final, error)
    why = error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
    return ArgumentError(f"folder={str(final)!r}: cannot be made ({why}); name one where you may write")


def _exists(final: Path) -> ArgumentError:
    return ArgumentError(f"folder={str(final)!r}: exists already; save under another name, or remove it first")


def not_written(final: Path, error: OSError, nbytes: int | None = None) -> DiskError:
    """Returns the error for a failed write of ``nbytes``."""
    about, advice = "", "check the disk, or save to another place"
    if error.errno in _NO_SPACE:
        advice = "free some space (a quota counts too), or save to another place"
        with suppress(OSError):
            disk = os.statvfs(final.parent)
            needed = "" if nbytes is None else f"{nbytes:,} bytes were to be written, "
            about = f"; {needed}{disk.f_bavail * disk.f_frsize:,} bytes are free there"
    why = error.strerror or str(error)
    return DiskError(error.errno, f"{final}: not saved ({why}{about}); {advice}. What was saved before is untouched")


@contextmanager
def naming(final: Path, nbytes: int) -> Iterator[None]:
    """Makes errors of the system say what was not saved and what to do."""
    try:
        yield
    except DiskError:
        raise
    except OSError as error:
        raise not_written(final, error, nbytes) from error


def finish(folder: Path, final: Path, content: Mapping[str, Any]) -> None:
    """Adds the manifest, gives the folder its name, and reads the finished checkpoint back."""
    text = manifest_text(content)
    _check_readable(final, text, content)
    write_durably(folder / MANIFEST, text)
    sync_folder(folder)
    try:
        os.rename(folder, final)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR):
            raise _exists(final) from error  # another save was faster
        raise
    leftovers.release(folder, named=final)
    confirm(final)
    _check(final, text, content["files"])


def confirm(final: Path) -> None:
    """Makes sure that the disk keeps the new name of ``final``."""
    try:
        sync_folder(final.parent)
    except OSError as error:
        why = f"the disk did not confirm that it keeps the name ({error.strerror})"
        raise DiskError(error.errno, f"{final}: written, but {why}; save again, to another place") from error


def _check_readable(final: Path, manifest: bytes, content: Mapping[str, Any]) -> None:
    """Refuses what ``load`` would refuse, while the earlier checkpoints still exist."""
    try:
        check_content(MANIFEST, content)
        if len(manifest) > LARGEST_MANIFEST:
            raise ArgumentError(
                f"{MANIFEST}: {len(manifest):,} bytes for {len(content['tensors']):,} tensors in "
                f"{len(content['files']) - 1:,} files, expected at most {LARGEST_MANIFEST:,}; save from fewer ranks"
            )
    except ArgumentError as error:
        raise StateError(f"{final}: not saved, since load() would refuse it ({error})") from error


def _check(final: Path, manifest: bytes, files: Mapping[str, Any]) -> None:
    try:
        if (final / MANIFEST).read_bytes() != manifest:
            raise ArgumentError(f"{final / MANIFEST}: not what was written")
        for name, expected in files.items():
            check_file(final, name, expected)
    except (ArgumentError, OSError) as error:
        raise _not_whole(final, str(error)) from error


def _not_whole(final: Path, why: str) -> StateError:
    return StateError(
        f"{final}: not whole when it was read back ({why}); if another process changes or removes it, save in a "
        "folder that is this run's alone"
    )


def give_up(folder: Path) -> None:
    """Removes what was written. Its name goes first: other ranks may be writing into it, and a folder that gets files
    while it is emptied stays. A name that is gone tells them."""
    going = leftovers.doomed(folder)
    with suppress(OSError):
        os.rename(folder, going)
        leftovers.remove(going)
    leftovers.remove(folder)  # where it could not be renamed
    leftovers.release(folder)


def write_durably(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Syncs a folder if the file system can and the process may read it."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NOT_FOR_FOLDERS:
            raise
    finally:
        os.close(handle)


def keep_only(final: Path, count: int) -> None:
    """Removes the oldest of ``final``'s series until ``count`` are left; never ``final``, newer ones or links.

    A series has names that are alike up to their last number.
    """
    going = final.parent
    try:
        series = [path for path in finished(going) if _series(path) == _series(final) and not path.is_symlink()]
        if final not in series:  # without it, newer and older have no meaning
            raise _not_whole(final, f"keep={count} does not find it among the finished ones, and removed nothing")
        older = series[: series.index(final)]
        for going in older[: max(0, len(series) - count)]:
            doomed = leftovers.doomed(going)
            with suppress(FileNotFoundError):  # another process has removed it
                os.rename(going, doomed)  # first: a half removed folder must not look like a checkpoint
                sync_folder(final.parent)  # nor after a power cut
                leftovers.remove(doomed)
    except OSError as error:
        what = "look for older ones" if going == final.parent else f"remove {going}"
        raise DiskError(
            error.errno,
            f"{final} is saved, but keep={count} could not {what} ({error.strerror}); remove them by hand",
        ) from error


def _series(path: Path) -> tuple[str, ...]:
    return tuple(re.split(r"\d+(?=\D*$)", path.name))
