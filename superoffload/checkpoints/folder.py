"""Reads a checkpoint's folder: its manifest, the files that the manifest lists, and which folders are whole."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from superoffload.checkpoints.manifest import LARGEST_STATE, VERSION, check_content
from superoffload.errors import ArgumentError
from superoffload.host.untrusted import read_bounded, read_json, regular_size, shown

MANIFEST = "manifest.json"
FORMAT = "superoffload checkpoint"
LARGEST_MANIFEST = 1 << 30  # bytes of a manifest: 300 per tensor and rank


def manifest_text(content: Mapping[str, Any]) -> bytes:
    whole = {"format": FORMAT, "version": VERSION, **content}
    return json.dumps({**whole, "checksum": _checksum(whole)}, separators=(",", ":"), sort_keys=True).encode()


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns the manifest. Raises ArgumentError with the file's name unless it is whole and ours."""
    path = folder / MANIFEST
    try:
        content: Any = read_json(path, LARGEST_MANIFEST, links=False)
    except (FileNotFoundError, NotADirectoryError):
        raise ArgumentError(f"{folder}: {_instead_of_a_manifest(folder)}") from None
    except ArgumentError as error:
        raise ArgumentError(f"{error}; take the checkpoint before it") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ArgumentError(f"{path}: not of superoffload; expected a folder that superoffload.checkpoints.save wrote")
    if content.get("version") not in range(1, VERSION + 1):
        raise ArgumentError(f"{path}: version {shown(content.get('version'))}, this superoffload reads 1 to {VERSION}")
    if content.pop("checksum", None) != _checksum(content):
        raise ArgumentError(f"{path}: differs from its own checksum; take the checkpoint before it")
    check_content(str(path), content)
    checked: dict[str, Any] = content
    return checked


_FILES_OF_OTHERS = (
    "; what torch.save wrote loads with torch.load and load_state_dict() of model and optimizer, a folder of "
    "save_pretrained with from_pretrained"
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
    """Checks a file's size; if the manifest has a SHA-256 of the whole file, checks it too and returns the bytes."""
    path = folder / name
    try:
        size = regular_size(path)
        if size != expected["bytes"]:
            raise ArgumentError(f"{path}: {size} bytes, the manifest says {expected['bytes']}; the file is damaged")
        if "sha256" not in expected:
            return None
        data = read_bounded(path, min(size, LARGEST_STATE), links=False)
    except OSError as error:
        raise ArgumentError(f"{path}: {error.strerror}; the checkpoint is not whole") from error
    if hashlib.sha256(data).hexdigest() != expected["sha256"]:
        raise ArgumentError(f"{path}: differs from its checksum in the manifest; the file is damaged")
    return data


def _order(path: Path) -> tuple[list[int], str]:
    return [int(number) for number in re.findall(r"\d+", path.name)], path.name


def finished(root: str | os.PathLike[str]) -> list[Path]:
    """Returns the checkpoints below ``root`` whose files have their manifests' sizes, by the numbers in their names.

    Raises OSError if ``root`` cannot be listed.
    """
    return list(_finished(root))[::-1]


def latest(root: str | os.PathLike[str]) -> Path | None:
    """Returns the newest whole checkpoint below ``root`` (by the number in its name, as in ``step-100``), or None.

    It passes over what it cannot read.
    """
    with contextlib.suppress(OSError, ValueError):  # root is absent, not a folder, or not a possible path
        return next(_finished(root), None)
    return None


def _finished(root: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields the newest first; ignores files that a manifest does not list, such as the lock of a killed save."""
    inside = [path for path in Path(root).iterdir() if not path.name.startswith(".")]
    inside = [path for path in inside if os.path.isfile(path / MANIFEST)]
    for path in sorted(inside, key=_order, reverse=True):
        with contextlib.suppress(ArgumentError, OSError):
            if all(regular_size(path / name) == one["bytes"] for name, one in read_manifest(path)["files"].items()):
                yield path
