"""A folder that exists wholly or not at all, and a manifest that says what belongs into it."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from superoffload.errors import ArgumentError

MANIFEST = "manifest.json"
FORMAT, VERSION = "superoffload checkpoint", 1
_WRITING, _REMOVING = ".writing-", ".removing-"
_NOT_THERE = (errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS)  # a full disk is none
_being_written: set[Path] = set()  # by this process


def begin(final: Path, token: str) -> Path:
    """A folder beside ``final`` to write into. What earlier runs left unfinished there is removed."""
    if final.exists():
        raise ArgumentError(f"folder={str(final)!r}: exists already; save under another name, or remove it first")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno not in _NOT_THERE:
            raise
        raise _cannot_be_made(final, error) from error
    for left in final.parent.glob(f"{_WRITING}*"):
        if left not in _being_written:
            shutil.rmtree(left, ignore_errors=True)
    folder = writing_folder(final, token)
    try:
        folder.mkdir()
    except OSError as error:
        if error.errno not in _NOT_THERE:
            raise
        raise _cannot_be_made(final, error) from error
    _being_written.add(folder)
    return folder


def _cannot_be_made(final: Path, error: OSError) -> ArgumentError:
    return ArgumentError(f"folder={str(final)!r}: cannot be made ({error.strerror}); name one where you may write")


def writing_folder(final: Path, token: str) -> Path:
    return final.parent / f"{_WRITING}{final.name}-{token}"


def finish(folder: Path, final: Path, content: Mapping[str, Any]) -> None:
    """Adds the manifest and gives the folder its name; from here on it is a checkpoint."""
    write_durably(folder / MANIFEST, manifest_text(content))
    sync_folder(folder)
    os.rename(folder, final)
    sync_folder(final.parent)
    _being_written.discard(folder)


def give_up(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    _being_written.discard(folder)


def write_durably(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def manifest_text(content: Mapping[str, Any]) -> bytes:
    whole = {"format": FORMAT, "version": VERSION, **content}
    return json.dumps({**whole, "checksum": _checksum(whole)}, indent=1, sort_keys=True).encode()


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Raises ArgumentError, with the file's name, for anything but a whole manifest of ours."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise ArgumentError(f"{folder}: {_instead_of_a_manifest(folder)}") from None
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{path}: cannot be read ({error}); take the checkpoint before it") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ArgumentError(f"{path}: not of superoffload; expected a folder that superoffload.checkpoints.save wrote")
    if content.get("version") != VERSION:
        raise ArgumentError(f"{path}: version {content.get('version')!r}, this superoffload reads {VERSION}")
    if content.pop("checksum", None) != _checksum(content):
        raise ArgumentError(f"{path}: differs from its own checksum; take the checkpoint before it")
    return content


_FILES_OF_OTHERS = (
    "; what torch.save wrote loads with torch.load and load_state_dict() of model and optimizer, a folder of "
    "from_pretrained with that"
)


def _instead_of_a_manifest(folder: Path) -> str:
    if not folder.exists():
        return "no such folder; checkpoints.latest() names the newest checkpoint in a folder of them"
    if not folder.is_dir():
        return "a file, expected the folder of a checkpoint" + _FILES_OF_OTHERS
    inside = latest(folder)
    if inside is not None:
        return f"a folder of checkpoints; load one of them, the newest is {inside} (checkpoints.latest() names it)"
    return f"no {MANIFEST}, so it is no finished checkpoint of superoffload" + _FILES_OF_OTHERS


def check_file(folder: Path, name: str, expected: Mapping[str, Any]) -> bytes | None:
    """Size of a file of the manifest and, where that has one, the checksum of all of it; then also its bytes."""
    path = folder / name
    try:
        size = path.stat().st_size
        if size != expected["bytes"]:
            raise ArgumentError(f"{path}: {size} bytes, the manifest says {expected['bytes']}; the file is damaged")
        if "sha256" not in expected:
            return None
        data = path.read_bytes()
    except OSError as error:
        raise ArgumentError(f"{path}: {error.strerror}; the checkpoint is not whole") from error
    if hashlib.sha256(data).hexdigest() != expected["sha256"]:
        raise ArgumentError(f"{path}: differs from its checksum in the manifest; the file is damaged")
    return data


def _order(path: Path) -> tuple[list[int], str]:
    return [int(number) for number in re.findall(r"\d+", path.name)], path.name


def finished(root: str | os.PathLike[str]) -> list[Path]:
    """Checkpoints below ``root`` whose files have the sizes of their manifests, by the numbers in their names."""
    found = []
    for path in sorted(Path(root).glob(f"*/{MANIFEST}"), key=lambda path: _order(path.parent)):
        if path.parent.name.startswith("."):
            continue
        with contextlib.suppress(ArgumentError, OSError, KeyError, AttributeError):
            files = read_manifest(path.parent)["files"]
            if all((path.parent / name).stat().st_size == one["bytes"] for name, one in files.items()):
                found.append(path.parent)
    return found


def latest(root: str | os.PathLike[str]) -> Path | None:
    """The newest whole checkpoint below ``root`` (by the number in its name, as in ``step-100``), or None."""
    return next(iter(reversed(finished(root))), None)


def keep_only(final: Path, count: int) -> None:
    """Removes the oldest checkpoints beside ``final``, never itself."""
    others = [path for path in finished(final.parent) if path != final]
    for path in others[: max(0, len(others) - (count - 1))]:
        going = path.parent / f"{_REMOVING}{path.name}"
        shutil.rmtree(going, ignore_errors=True)
        os.rename(path, going)  # at once: a half removed folder must not look like a checkpoint
        shutil.rmtree(going)
