"""Defines our errors and warnings.

Every message names the argument or event, its value, what was expected and what to do.
"""

from __future__ import annotations

import reprlib
import sys
import warnings
from typing import Any

_PASSED_OVER = ("superoffload", "torch")  # packages


def warn(message: str) -> None:
    """Warns with the line of the program that led here: the nearest one outside of superoffload and torch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _PASSED_OVER:
        frame, level = frame.f_back, level + 1
    warnings.warn(f"superoffload: {message}", RuntimeWarning, stacklevel=level)


class SuperOffloadError(RuntimeError):
    """Reports a problem that superoffload itself has found. The state is that of the last finished step."""


class ArgumentError(SuperOffloadError, ValueError):
    """An argument, a file or an input cannot be used; nothing was changed."""


class UnknownArgument(ArgumentError, TypeError):
    """A keyword argument does not exist. This is also a TypeError, which Python raises for unknown keywords."""


class WrongType(ArgumentError, TypeError):
    """A value has a type that cannot be used. This is also a TypeError, which torch's optimizers raise there."""


class StateError(SuperOffloadError):
    """A call does not fit the calls before it (a closed optimizer, a forked process, ...)."""


class HostMemoryError(SuperOffloadError, MemoryError):
    """The system refused host memory; the message names the size, the purpose and what needs less. If ``step()`` raises
    it, the step was completed, and the next gradient asks for the memory again."""


class WorkerError(SuperOffloadError):
    """A worker thread failed; its speculated work was undone."""


class DeviceError(WorkerError):
    """The accelerator or its driver failed. Masters and moments are those of the last finished step."""


class TornStep(RuntimeError):
    """The accelerator failed in the middle of a step on it. The state is mixed, so the optimizer is unusable.

    This is no SuperOffloadError: after one of those the state is that of a finished step.
    """


class RankError(SuperOffloadError):
    """Ranks were lost or have diverged. Every rank that still runs raises this. The step was abandoned or had ended."""


class KernelsUnavailable(SuperOffloadError):
    """The accelerator's kernels cannot be compiled here; the message says what to install."""


class DiskError(OSError, SuperOffloadError):
    """A file could not be written: a full disk, a quota, a failing device. The previous content is untouched.

    ``errno`` is that of the system's call, as for any OSError.
    """

    def __str__(self) -> str:
        return str(self.strerror)


def shown(value: Any) -> str:
    """Shows some of a value of any size and depth on one line, in little time."""
    return shortened(reprlib.repr(value))


def shortened(text: str) -> str:
    return printable(text if len(text) <= 200 else f"{text[:100]}...{text[-100:]}")


def printable(text: str) -> str:
    """Escapes characters that steer a terminal, turn a line's direction or are no valid text."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
