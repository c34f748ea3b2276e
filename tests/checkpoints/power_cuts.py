"""What a power cut can leave of recorded changes: what was not synced may be there, or not, or in part.

A file keeps the bytes that it had when it was synced, a folder the names. Of what came later, each change of a name may
have reached the disk or not; of a file's bytes all, none, a part, or zeros. A renaming is one change, as every journal
of a file system has it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

Files = dict[str, bytes | None]  # by relative path; None: a folder


class _File:
    def __init__(self, data: bytes = b"") -> None:
        self.data = bytearray(data)
        self.synced = bytes(data)

    def zeros(self) -> bytes:
        """Where it has grown, as when the size reached the disk before the bytes."""
        return self.synced + bytes(max(0, len(self.data) - len(self.synced)))

    def some(self, chance: random.Random) -> bytes:
        if bytes(self.data) == self.synced:
            return self.synced
        part = bytes(self.data[: chance.randrange(len(self.data) + 1)])
        return chance.choice([self.synced, bytes(self.data), part, self.zeros()])


class _Folder:
    """``pending``: changes since the last sync, as (old name, new name, what)."""

    def __init__(self) -> None:
        self.entries: _Entries = {}
        self.synced: _Entries = {}
        self.pending: list[tuple[str | None, str | None, _File | _Folder]] = []

    def change(self, old: str | None, new: str | None, what: _File | _Folder) -> None:
        self.pending.append((old, new, what))
        _apply(self.entries, old, new, what)

    def sync(self) -> None:
        self.synced = dict(self.entries)
        self.pending.clear()

    def some(self, chance: random.Random) -> _Entries:
        found = dict(self.synced)
        for old, new, what in self.pending:
            if chance.random() < 0.5 and (old is None or found.get(old) is what):
                _apply(found, old, new, what)
        return found


def _apply(entries: _Entries, old: str | None, new: str | None, what: _File | _Folder) -> None:
    if old is not None:
        entries.pop(old, None)
    if new is not None:
        entries[new] = what


_Entries = dict[str, _File | _Folder]


class Disk:
    """Files below ``root`` as recorded changes make them; all of what is there at first is synced."""

    def __init__(self, root: Path, files: Files) -> None:
        self._root, self._top = root, _Folder()
        for name, data in sorted(files.items()):
            folder, last = self._place(root / name)
            folder.entries[last] = _Folder() if data is None else _File(data)
        for folder in self._folders(self._top):
            folder.sync()

    def _place(self, path: Path) -> tuple[_Folder, str]:
        folder = self._top
        *above, last = path.relative_to(self._root).parts
        for name in above:
            inner = folder.entries[name]
            assert isinstance(inner, _Folder), path
            folder = inner
        return folder, last

    def _folders(self, folder: _Folder) -> Iterator[_Folder]:
        yield folder
        for inner in folder.entries.values():
            if isinstance(inner, _Folder):
                yield from self._folders(inner)

    def change(self, kind: str, path: str, *rest: str) -> None:
        if Path(path) == self._root:
            assert kind == "sync", kind
            return self._top.sync()
        folder, name = self._place(Path(path))
        if kind in ("create", "mkdir"):
            return folder.change(None, name, _File() if kind == "create" else _Folder())
        what = folder.entries[name]
        if kind == "remove":
            return folder.change(name, None, what)
        if kind == "rename":
            target, new = self._place(Path(rest[0]))
            assert target is folder, "between two folders: not one change"
            return folder.change(name, new, what)
        if kind == "sync" and isinstance(what, _Folder):
            return what.sync()
        assert isinstance(what, _File), kind
        if kind == "sync":
            what.synced = bytes(what.data)
        elif kind == "truncate":
            size = int(rest[0])
            what.data[:] = what.data[:size].ljust(size, b"\0")
        else:
            assert kind == "write", kind
            at, data = int(rest[0]), bytes.fromhex(rest[1])
            what.data.extend(bytes(max(0, at - len(what.data))))
            what.data[at : at + len(data)] = data
        return None

    def now(self) -> Files:
        """Without a power cut."""
        return self._left(self._top, lambda folder: folder.entries, lambda file: bytes(file.data))

    def after_a_power_cut(self, seeds: Sequence[int]) -> Iterator[Files]:
        """Only what was synced; all names with no bytes, or with zeros; and some of it, by ``seeds``."""
        yield self._left(self._top, lambda folder: folder.synced, lambda file: file.synced)
        yield self._left(self._top, lambda folder: folder.entries, lambda file: file.synced)
        yield self._left(self._top, lambda folder: folder.entries, _File.zeros)
        for seed in seeds:
            chance = random.Random(seed)
            yield self._left(self._top, partial(_Folder.some, chance=chance), partial(_File.some, chance=chance))

    def _left(self, top: _Folder, names: Callable[[_Folder], _Entries], data: Callable[[_File], bytes]) -> Files:
        found: Files = {}
        for name, what in names(top).items():
            if isinstance(what, _File):
                found[name] = data(what)
            else:
                found[name] = None
                found.update({f"{name}/{path}": one for path, one in self._left(what, names, data).items()})
        return found


def read(root: Path) -> Files:
    """What is below ``root``; links are not followed, nor are they there."""
    found: Files = {}
    for path in sorted(root.rglob("*")):
        if not path.is_symlink():
            found[str(path.relative_to(root))] = None if path.is_dir() else path.read_bytes()
    return found


def write(root: Path, files: Files) -> None:
    root.mkdir(parents=True)
    for name, data in sorted(files.items()):
        if data is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(data)
