"""What the commands share: options, hints, and files that are written or refused early."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from superoffload.errors import ArgumentError, SuperOffloadError


def add_option(group: argparse._ActionsContainer, flag: str, *, help: str, **settings: Any) -> None:
    """Adds an argument whose help tells its default, if it has one."""
    default = settings.get("default")
    group.add_argument(flag, help=help if default is None else f"{help} (default: {default})", **settings)


def meant(word: str, names: Iterable[str]) -> str:
    found = [name for name in names if word and name.startswith(word)] or get_close_matches(word, list(names), n=1)
    return f"did you mean {' or '.join(found)}? " if found else ""


def check_writable(path: str | None, argument: str) -> None:
    """Fails now if a file that is written at the end cannot be; leaves no new file."""
    if path is None:
        return
    is_new = not os.path.lexists(path)
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666))
        if is_new:
            Path(path).unlink(missing_ok=True)  # other ranks check it at the same time
    except OSError as error:
        raise ArgumentError(
            f"{argument}={path}: the file cannot be written ({error.strerror}); name a file in an existing folder"
        ) from error


def write_json(path: str | os.PathLike[str] | None, values: Mapping[str, Any]) -> None:
    if path is None:
        return
    with naming_write_errors(path):
        Path(path).write_text(json.dumps(values, indent=2, allow_nan=False) + "\n", encoding="utf-8")


@contextmanager
def naming_write_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns OSError, such as a full disk, into an error that names the file."""
    try:
        yield
    except OSError as error:
        raise SuperOffloadError(
            f"{path}: cannot be written ({error.strerror}); free some space, or choose another place with --out"
        ) from error
