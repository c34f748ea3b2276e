"""Reads files and names from outside: regular files only, of bounded size, JSON of bounded depth, printable names."""

from __future__ import annotations

import json
import math
import os
import reprlib
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from typing import Any

from superoffload.errors import ArgumentError

LARGEST = 64 << 20  # bytes of a file that describes a model, a run or a checkpoint
_DEEPEST = 64  # levels of lists and objects; far below what Python's parser survives
_BLOCK = 1 << 16  # bytes checked at a time
_MOST = 1 << 62  # of any count in a file
_MOST_DIMS = 64  # torch's own limit
_BRACKETS = bytes.maketrans(b"[]", b"{}")
_OTHERS = bytes(set(range(256)) - set(b"[]{}"))


@contextmanager
def open_regular(path: str | os.PathLike[str], *, links: bool = True) -> Iterator[FileIO]:
    """Opens a regular file for reading, without a buffer. Refuses pipes and devices without opening them.

    With ``links`` False it refuses a link in place of the file too; folders above it may be links. FileNotFoundError
    and NotADirectoryError pass through; all other failures are an ArgumentError with the path.
    """
    try:
        _check_regular(path, os.stat(path, follow_symlinks=links).st_mode)
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW))
    except (FileNotFoundError, NotADirectoryError):
        raise
    except (OSError, ValueError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise cannot_be_read(path, error) from error
    with open(handle, "rb", buffering=0) as file:
        _check_regular(path, os.fstat(handle).st_mode)  # another file may have taken the path meanwhile
        yield file


def _check_regular(path: str | os.PathLike[str], mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe, a socket or a device"
        if stat.S_ISLNK(mode):
            kind = "a link, which could lead anywhere (cp -rL copies a folder with what its links lead to)"
        raise ArgumentError(f"{os.fspath(path)}: {kind}, expected a regular file")


def cannot_be_read(path: str | os.PathLike[str], error: Exception) -> ArgumentError:
    """Makes the error of an unreadable path, also of one with a NUL or too long, where Python's messages vary."""
    why = getattr(error, "strerror", None) or str(error)
    return ArgumentError(f"{printable(shortened(os.fspath(path)))}: cannot be read ({why})")


def regular_size(path: str | os.PathLike[str]) -> int:
    """Returns the bytes of a regular file that is no link; raises as ``open_regular`` does."""
    with open_regular(path, links=False) as file:
        return os.fstat(file.fileno()).st_size


def read_bounded(path: str | os.PathLike[str], largest: int = LARGEST, *, links: bool = True) -> bytes:
    """Reads a regular file of at most ``largest`` bytes, once in memory; raises as ``open_regular`` does."""
    too_large = ArgumentError(f"{os.fspath(path)}: more than {largest} bytes, expected at most as many")
    with open_regular(path, links=links) as file:
        size = os.fstat(file.fileno()).st_size
        if size > largest:
            raise too_large
        try:
            parts, done = [], 0
            while part := file.read(max(1 << 16, min(size, largest) - done) + 1):  # the file may grow meanwhile
                parts.append(part)
                done += len(part)
                if done > largest:
                    raise too_large
        except OSError as error:
            raise cannot_be_read(path, error) from error
    return b"".join(parts)  # a single part is not copied


def read_json(path: str | os.PathLike[str], largest: int = LARGEST, *, links: bool = True) -> Any:
    """Parses a JSON file; raises as ``open_regular`` does."""
    try:
        return parse_json(read_bounded(path, largest, links=links))
    except ValueError as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(f"{os.fspath(path)}: not JSON that can be read ({error})") from error


def parse_json(data: bytes) -> Any:
    """Parses JSON in UTF-8; raises ValueError for other input and for more or deeper lists than ours.

    It takes up to 25 times the memory of ``data`` (short names that are all different); for our files 3 to 10 times.
    """
    _check_brackets(data)
    return json.loads(data.decode("utf-8"))


def _check_brackets(data: bytes) -> None:
    """Checks nesting block by block, without recursion (Python's parser recurses) and in little memory."""
    depth, count, in_text, cut_off = 0, 0, 0, b""
    for first in range(0, len(data), _BLOCK):
        block = (cut_off + data[first : first + _BLOCK]).replace(rb"\\", b"")
        cut_off = block[-1:] if block.endswith(b"\\") else b""  # escapes what begins the next block
        parts = block.replace(rb"\"", b"").split(b'"')  # now every quote begins or ends a string
        found = b"".join(parts[in_text::2]).translate(_BRACKETS, _OTHERS)
        in_text ^= (len(parts) - 1) % 2
        count += found.count(b"{")
        left = b"{" * depth + found
        for _ in range(_DEEPEST):  # removes the innermost pairs, level by level
            left = left.replace(b"{}", b"")
        depth = len(left)
        if depth > _DEEPEST or b"}" in left:
            raise ValueError(f"nested deeper than {_DEEPEST} levels, or with brackets that do not match")
        if count > _BLOCK + len(data) // 16:  # each takes up to 232 bytes in memory
            raise ValueError(f"{count} lists and objects or more, expected at most one in 16 bytes")


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MOST


def is_shape(value: Any) -> bool:
    """Tells whether ``value`` is a list of numbers and a shape whose elements and strides torch can count."""
    if not isinstance(value, list) or len(value) > _MOST_DIMS or not all(map(is_count, value)):
        return False
    elements: int = math.prod(max(1, size) for size in value)  # fast: 64 numbers of at most 2^62
    return elements <= _MOST


def nested_deeply(value: Any) -> bool:
    """Finds lists and dicts in a circle or of more levels than JSON may have here: recursion into them would fail."""
    level = {id(value): value}  # each object once, since another may contain it a million times
    for _ in range(_DEEPEST):
        level = {
            id(inner): inner
            for one in level.values()
            if isinstance(one, (list, tuple, dict, set))
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, (list, tuple, dict, set))
        }
        if not level:
            return False
    return True


def shown(value: Any) -> str:
    """Shows some of a value of any size and depth on one line, in little time."""
    return printable(shortened(reprlib.repr(value)))


def shortened(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:100]}...{text[-100:]}"


def printable(text: str) -> str:
    """Escapes characters that steer a terminal, turn a line's direction or are no valid text."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
