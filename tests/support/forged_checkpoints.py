"""Checkpoints made to harm, with checksums that fit, and files that are none."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from superoffload.checkpoints import folder as folders

Content = dict[str, Any]
NESTED = "[" * 100_000 + "]" * 100_000


def forged(saved: Path, folder: Path, change: Callable[[Content], None]) -> Path:
    """A copy whose manifest was changed and has the checksum that fits."""
    folder.mkdir(parents=True)
    for path in saved.iterdir():
        os.link(path, folder / path.name)
    content = json.loads((saved / "manifest.json").read_bytes())
    del content["checksum"], content["format"], content["version"]
    change(content)
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").write_bytes(folders.manifest_text(content))
    return folder


def a_file(name: Any, **values: Any) -> Callable[[Content], None]:
    return lambda content: content["files"].update({name: {"bytes": 5, "sha256": "0" * 64, **values}})


def with_state(saved: Path, folder: Path, data: bytes) -> Path:
    forged(saved, folder, a_file("state.pt", bytes=len(data), sha256=hashlib.sha256(data).hexdigest()))
    (folder / "state.pt").unlink()
    (folder / "state.pt").write_bytes(data)
    return folder


def fifo(path: Path) -> None:
    os.mkfifo(path)


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


STRANGE: dict[str, Callable[[Path], Any]] = {
    "a FIFO": fifo,
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to nothing": lambda path: path.symlink_to(path.parent / "nothing"),
    "a huge file": sparse,
    "nested deeply": lambda path: path.write_text(NESTED),
    "nested in text": lambda path: path.write_text('{"\\\\": "[", "a\\"": ' + NESTED + "}"),
    "no UTF-8": lambda path: path.write_bytes(b"\xff\xfe{}"),
    "a number": lambda path: path.write_text("1"),
    "many digits": lambda path: path.write_text("9" * 5000),
}
