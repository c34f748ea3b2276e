"""From construction to the end: what is in use, what was interrupted, closing, forking, leaving the process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from superoffload.closing import close_at_exit, is_closed
from superoffload.core import Core
from superoffload.errors import StateError, SuperOffloadError
from superoffload.interrupts import held_signals

if TYPE_CHECKING:
    from typing_extensions import Self


class Lifetime(Optimizer):
    """Whether the optimizer can be used, and how its use ends."""

    _core: Core
    _closed = False
    _interrupted = False

    def _begin(self) -> None:
        """First of all in the constructor."""
        self._pid = os.getpid()
        self._made_as = id(self)

    def _open(self) -> None:
        """Last of all in the constructor: from now on it is closed when the process ends."""
        close_at_exit(self)

    def _remove_hooks(self) -> None:
        """Those on what may outlive the optimizer; every layer removes its own."""

    def close(self) -> None:
        """Takes back what was speculated and ends the worker threads. The state stays readable."""
        try:
            if self._interrupted:
                self._core.end_threads()
            elif not self._out_of_use():
                with self._whole():
                    self._core.close()
        finally:
            self._closed = True
            if self._core.timeline is not None:
                self._core.timeline.close()
            self._remove_hooks()
            is_closed(self)

    def __del__(self) -> None:
        # Lightning wraps an optimizer in an object of a derived class that shares its attributes and goes before it.
        # One that is closed is left alone: when the process ends, what close() uses may be gone.
        if hasattr(self, "_core") and self._made_as == id(self) and not self._closed:
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError("an optimizer with worker threads cannot be copied or pickled; save its state_dict() instead")

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__reduce_ex__(None)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Around everything that must be done wholly or not at all. If it is cut off all the same, we say so."""
        with held_signals():
            try:
                yield
            except SuperOffloadError:
                raise  # after putting everything in order
            except BaseException:
                self._interrupted = True
                raise

    def _out_of_use(self) -> bool:
        return self._closed or self._interrupted or self._pid != os.getpid()

    def _check_usable(self, *, closed_too: bool = False) -> None:
        if self._interrupted:
            raise StateError(
                "the optimizer was interrupted in the middle of its work (see the error before this one) and its state "
                "cannot be trusted; make a new one and load the last checkpoint"
            )
        if self._pid != os.getpid():
            raise StateError(
                f"the optimizer was made in process {self._pid} and its worker threads do not survive fork(); "
                "make the optimizer in the process that trains"
            )
        if self._closed and not closed_too:
            raise StateError("the optimizer is closed; make a new one and load the state_dict() of this one")
