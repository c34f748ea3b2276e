"""A checkpoint's folder on disk: whole under its name or absent, with a manifest of checksums; and which to keep."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from superoffload.checkpoints.tensor_files import StoredPart
from superoffload.distributed.ownership import misfit
from superoffload.errors import ArgumentError, DiskError, StateError, shortened, shown, warn

MANIFEST, STATE = "manifest.json", "state.pt"
FORMAT, VERSION = "superoffload checkpoint", 2
_LARGEST_MANIFEST = 1 << 30  # bytes: 300 per tensor and rank
_PART = re.compile(r"rank-\d{5,9}\.safetensors")
_HIDDEN = re.compile(r"\.(?P<kind>writing|removing)-(?P<name>.+)-[0-9a-f]{12}")
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_FOR_FOLDERS = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF)  # on some FUSE, CIFS and 9p


# ---- names --------------------------------------------------------------------------------------------------------


def path_of(folder: str | os.PathLike[str]) -> Path:
    """Returns the absolute path, or raises ArgumentError; does not touch the disk, so that all ranks agree."""
    try:
        final = Path(os.path.abspath(os.fspath(folder)))
        if b"\0" in os.fsencode(final):
            raise ValueError("it contains a NUL character")
    except (TypeError, ValueError, OSError) as error:
        raise ArgumentError(f"folder={folder!r}: no path of a folder ({error}); name one that can be made") from error
    return final


def hidden(final: Path, kind: str) -> Path:
    """Returns a new name beside ``final``, which no reader takes for a checkpoint. ``kind``: writing or removing."""
    return final.with_name(f".{kind}-{_stem(final)}-{uuid.uuid4().hex[:12]}")


def _stem(final: Path) -> str:
    return os.fsdecode(os.fsencode(final.name)[:200])  # a name may have 255 bytes


def _hidden(parent: Path) -> Iterator[tuple[Path, str, str]]:
    """Yields the hidden paths in ``parent``, each with its kind and the name that it belongs to."""
    with contextlib.suppress(OSError):  # a folder may be written and not read
        for entry in os.listdir(parent):
            found = _HIDDEN.fullmatch(entry)
            if found is not None:
                yield parent / entry, found["kind"], found["name"]


def _series(path: Path) -> tuple[str, ...]:
    return tuple(re.split(r"\d+(?=\D*$)", path.name))


def _order(path: Path) -> tuple[list[int], str]:
    return [int(number) for number in re.findall(r"\d+", path.name)], path.name


# ---- written ------------------------------------------------------------------------------------------------------


def begin(final: Path) -> Path:
    """Makes a hidden folder beside ``final`` to write into, and removes what killed saves of this name left behind."""
    try:
        if os.path.lexists(final):  # a dangling link is in the way too
            raise _exists(final)
        make_parents(final)
        for path, kind, name in _hidden(final.parent):
            if kind == "writing" and name == _stem(final):
                give_up(path)
        _warn_of_newer(final)
        folder = hidden(final, "writing")
        folder.mkdir()
    except OSError as error:
        if error.errno in (*_NO_SPACE, errno.EIO, errno.ESTALE):
            raise _not_written(final, error) from error
        why = error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
        raise ArgumentError(f"folder={str(final)!r}: cannot be made ({why}); name one where you may write") from error
    return folder


def make_parents(final: Path) -> None:
    """Makes missing parents and syncs them to the disk: losing a folder loses the checkpoints in it."""
    ancestors = list(final.parents)
    missing = ancestors[: next((i for i, path in enumerate(ancestors) if path.is_dir()), 0)]
    for path in (final, *missing):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(ancestors[len(missing)] / path.name)  # refuses too long a name before any folder is made
    for path in reversed(missing):
        path.mkdir(exist_ok=True)  # another process may have been faster
        sync_folder(path.parent)


def _warn_of_newer(final: Path) -> None:
    """Warns where ``latest()`` will not name this checkpoint, as after a run that began anew in a folder of another."""
    with contextlib.suppress(OSError):
        series = [path for path in final.parent.iterdir() if _series(path) == _series(final)]
        newest = max(series, key=_order, default=final)
        if _order(newest) > _order(final) and os.path.isfile(newest / MANIFEST):
            warn(
                f"{newest} has a higher number than what is saved now, so latest() names it and keep "
                "leaves it; if it is of another run, save into another folder or remove it"
            )


def _exists(final: Path) -> ArgumentError:
    return ArgumentError(f"folder={str(final)!r}: exists already; save under another name, or remove it first")


def _not_written(final: Path, error: OSError, nbytes: int | None = None) -> DiskError:
    about, advice = "", "check the disk, or save to another place"
    if error.errno in _NO_SPACE:
        advice = "free some space (a quota counts too), or save to another place"
        with contextlib.suppress(OSError):
            disk = os.statvfs(final.parent)
            needed = "" if nbytes is None else f"{nbytes:,} bytes were to be written, "
            about = f"; {needed}{disk.f_bavail * disk.f_frsize:,} bytes are free there"
    why = error.strerror or str(error)
    return DiskError(error.errno, f"{final}: not saved ({why}{about}); {advice}. What was saved before is untouched")


@contextlib.contextmanager
def naming(final: Path, nbytes: int) -> Iterator[None]:
    """Makes errors of the system say what was not saved and what to do."""
    try:
        yield
    except DiskError:
        raise
    except OSError as error:
        raise _not_written(final, error, nbytes) from error


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


def manifest_text(content: Mapping[str, Any]) -> bytes:
    whole = {"format": FORMAT, "version": VERSION, **content}
    return json.dumps({**whole, "checksum": _checksum(whole)}, separators=(",", ":"), sort_keys=True).encode()


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def finish(folder: Path, final: Path, content: Mapping[str, Any]) -> None:
    """Adds the manifest, gives the folder its name, and looks at the finished checkpoint."""
    text = manifest_text(content)
    write_durably(folder / MANIFEST, text)
    sync_folder(folder)
    try:
        os.rename(folder, final)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR):
            raise _exists(final) from error  # another save was faster
        raise
    confirm(final)
    try:
        if (final / MANIFEST).read_bytes() != text:
            raise ArgumentError(f"{final / MANIFEST}: not what was written")
        _check_files(final, content["files"])
    except (ArgumentError, OSError) as error:
        raise _not_whole(final, str(error)) from error


def confirm(final: Path) -> None:
    """Makes sure that the disk keeps the new name of ``final``."""
    try:
        sync_folder(final.parent)
    except OSError as error:
        why = f"the disk did not confirm that it keeps the name ({error.strerror})"
        raise DiskError(error.errno, f"{final}: written, but {why}; save again, to another place") from error


def _not_whole(final: Path, why: str) -> StateError:
    return StateError(
        f"{final}: not whole when it was read back ({why}); if another process changes or removes it, save in a "
        "folder that is this run's alone"
    )


# ---- removed ------------------------------------------------------------------------------------------------------


def give_up(path: Path) -> None:
    """Removes a hidden file or folder. Its name goes first: other ranks may be writing into it, and a folder that gets
    files while it is emptied stays. A name that is gone tells them."""
    found = _HIDDEN.fullmatch(path.name)
    going = path if found is None else hidden(path.with_name(found["name"]), "removing")
    with contextlib.suppress(OSError):
        os.rename(path, going)
    for one in (going, path):  # the second where it could not be renamed
        with contextlib.suppress(OSError):
            one.unlink() if one.is_file() else shutil.rmtree(one, ignore_errors=True)


def keep_only(final: Path, count: int) -> None:
    """Removes the oldest of ``final``'s series until ``count`` are left; never ``final``, newer ones or links.

    A series has names that are alike up to their last number. What killed saves of it left behind goes too.
    """
    going = final.parent
    try:
        series = [one for one in finished(going) if _series(one) == _series(final) and not one.is_symlink()][::-1]
        if final not in series:  # without it, newer and older have no meaning
            raise _not_whole(final, f"keep={count} does not find it among the finished ones, and removed nothing")
        older = series[: series.index(final)]
        for going in older[: max(0, len(series) - count)]:
            doomed = hidden(going, "removing")
            with contextlib.suppress(FileNotFoundError):  # another process has removed it
                os.rename(going, doomed)  # first: a half removed folder must not look like a checkpoint
                sync_folder(final.parent)  # nor after a power cut
                give_up(doomed)
    except OSError as error:
        what = "look for older ones" if going == final.parent else f"remove {going}"
        raise DiskError(
            error.errno,
            f"{final} is saved, but keep={count} could not {what} ({error.strerror}); remove them by hand",
        ) from error
    for left, _, name in _hidden(final.parent):
        of = final.with_name(name)
        if _series(of) == _series(final) and _order(of) < _order(final):  # the saves before this one have ended
            give_up(left)


# ---- read ---------------------------------------------------------------------------------------------------------


class Stored(NamedTuple):
    """Says where a piece of a tensor is, and the checksum of its bytes."""

    piece: StoredPart
    file: str
    sha256: str


class Manifest(NamedTuple):
    """Holds sizes and checksums by file, and by entry the pieces that cover it once."""

    files: dict[str, Any]
    tensors: dict[str, list[Stored]]


def read_manifest(folder: Path) -> Manifest:
    """Raises ArgumentError with the file's name unless the manifest is whole and ours, and all files have its sizes."""
    path = folder / MANIFEST
    if not os.path.isfile(path):
        raise ArgumentError(f"{folder}: {_instead_of_a_manifest(folder)}")
    try:
        if path.stat().st_size > _LARGEST_MANIFEST:
            raise ValueError(f"more than {_LARGEST_MANIFEST} bytes")
        content: Any = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        why = shortened(str(error))
        raise ArgumentError(f"{path}: cannot be read ({why}); take the checkpoint before it") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ArgumentError(f"{path}: not of superoffload; expected a folder that superoffload.checkpoints.save wrote")
    if content.get("version") != VERSION:
        raise ArgumentError(f"{path}: version {shown(content.get('version'))}, this superoffload reads {VERSION}")
    if content.pop("checksum", None) != _checksum(content):
        raise ArgumentError(f"{path}: differs from its own checksum; take the checkpoint before it")
    try:
        _check_files(folder, content["files"])
        tensors = {key: _pieces(key, parts, content["files"]) for key, parts in content["tensors"].items()}
    except ArgumentError:
        raise
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        why = shortened(f"{type(error).__name__}: {error}")
        raise ArgumentError(f"{path}: {why}; the manifest is damaged, or not of superoffload") from error
    return Manifest(content["files"], tensors)


def _pieces(key: str, parts: list[Mapping[str, Any]], files: Mapping[str, Any]) -> list[Stored]:
    """Raises an error of any kind unless the parts of a tensor are in the files and fit together."""
    stored = [Stored(StoredPart.of_json(part), part["file"], part["sha256"]) for part in parts]
    if not all(one.file in files and one.file != STATE and isinstance(one.sha256, str) for one in stored):
        raise ValueError(f"{key}: expected files that the manifest lists, and checksums")
    first = stored[0].piece
    if any((one.piece.shape, one.piece.flat) != (first.shape, first.flat) for one in stored):
        raise ValueError(f"{key}: expected pieces of one shape, cut in one way")
    found = misfit(first.sizes, [one.piece.box for one in stored])
    if found is not None:
        raise ValueError(f"{key}: expected pieces that cover all of it once, {found.what}")
    return stored


def _check_files(folder: Path, files: Mapping[str, Any]) -> None:
    """Raises ArgumentError unless all files are there and regular, and have the sizes that the manifest says; an error
    of any kind for what is no dict of files."""
    if STATE not in files:
        raise ValueError(f"expected a file {STATE}")
    for name, one in files.items():
        size, checksum = one["bytes"], one["sha256" if name == STATE else "header"]
        if not (name == STATE or _PART.fullmatch(name)) or type(size) is not int or not isinstance(checksum, str):
            raise ValueError(f"{name}: expected {STATE} and rank-NUMBER.safetensors, each with bytes and a checksum")
        path = folder / name
        try:
            found = path.stat().st_size if os.path.isfile(path) else None
        except OSError as error:
            raise ArgumentError(f"{path}: {error.strerror}; the checkpoint is not whole") from error
        if found is None:
            raise ArgumentError(f"{path}: no regular file is there; the checkpoint is not whole")
        if found != size:
            raise ArgumentError(f"{path}: {found} bytes, the manifest says {size}; the file is damaged")


def _instead_of_a_manifest(folder: Path) -> str:
    if not os.path.exists(folder):
        return "no such folder; checkpoints.latest() names the newest checkpoint in a folder of them"
    inside = latest(folder)
    if inside is not None:
        return f"a folder of checkpoints; load one of them, the newest is {inside} (checkpoints.latest() names it)"
    what = f"no {MANIFEST}, so it is no finished checkpoint of superoffload"
    return (
        f"{what if folder.is_dir() else 'a file, expected the folder of a checkpoint'}; what torch.save wrote loads "
        "with torch.load and load_state_dict() of model and optimizer, a folder of save_pretrained with from_pretrained"
    )


def latest(root: str | os.PathLike[str]) -> Path | None:
    """Returns the newest whole checkpoint below ``root`` (by the number in its name, as in ``step-100``), or None.

    It passes over what it cannot read.
    """
    with contextlib.suppress(OSError, ValueError):  # root is absent, not a folder, or not a possible path
        return next(finished(root), None)
    return None


def finished(root: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields the checkpoints below ``root`` whose files have their manifests' sizes, from the highest number down.

    Raises OSError if ``root`` cannot be listed.
    """
    inside = [path for path in Path(root).iterdir() if not path.name.startswith(".")]
    inside = [path for path in inside if os.path.isfile(path / MANIFEST)]
    for path in sorted(inside, key=_order, reverse=True):
        with contextlib.suppress(ArgumentError, OSError):
            read_manifest(path)
            yield path
