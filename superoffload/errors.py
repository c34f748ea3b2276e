"""What superoffload raises. Every message names the argument or event, its value, what was expected, what to do."""

from __future__ import annotations


class SuperOffloadError(RuntimeError):
    """Anything that superoffload itself found wrong. The state is that of the last finished step."""


class ArgumentError(SuperOffloadError, ValueError):
    """An argument, a file or an input that cannot be used; nothing was changed."""


class UnknownArgument(ArgumentError, TypeError):
    """A keyword argument that does not exist. Also a TypeError, which is what Python makes of one elsewhere."""


class WrongType(ArgumentError, TypeError):
    """Something of a type that cannot be used. Also a TypeError, which is what torch's optimizers raise there."""


class StateError(SuperOffloadError):
    """A call that does not fit what happened before it (a closed optimizer, a forked process, ...)."""


class HostMemoryError(SuperOffloadError, MemoryError):
    """The system refused host memory; the message says how much, for what, and what needs less. Out of a ``step()``:
    the step was completed, and the next gradient asks for the memory again."""


class WorkerError(SuperOffloadError):
    """A worker thread failed; its speculated work was undone."""


class DeviceError(WorkerError):
    """The accelerator or its driver failed. Masters and moments are those of the last finished step."""


class TornStep(RuntimeError):
    """The accelerator failed in the middle of a step on it: nothing can be put in order, so the optimizer is unusable.

    No SuperOffloadError: after one of those the state is that of a finished step.
    """


class RankError(SuperOffloadError):
    """Ranks were lost or have diverged; raised on every rank that still runs. The step was abandoned or had ended."""


class KernelsUnavailable(SuperOffloadError):
    """The accelerator's kernels cannot be compiled here; the message says what to install."""


class DiskError(OSError, SuperOffloadError):
    """A file could not be written: a full disk, a quota, a failing device. What was there before is untouched.

    ``errno`` is that of the system's call, as for any OSError.
    """

    def __str__(self) -> str:
        return str(self.strerror)
