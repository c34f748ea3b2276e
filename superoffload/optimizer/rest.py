"""Between generation and training an optimizer sleeps: it keeps masters and moments, and gives other memory back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from superoffload.engine.engine import Engine
from superoffload.errors import StateError, SuperOffloadError
from superoffload.host.memory import give_free_memory_back
from superoffload.host.tensors import local_of
from superoffload.optimizer.lifetime import Lifetime
from superoffload.optimizer.params import Params
from superoffload.optimizer.state import State
from superoffload.optimizer.untraced import untraced


class Rest:
    """Has the engine give its memory back and take it again; both need no other rank."""

    def __init__(self, lifetime: Lifetime, engine: Engine, params: Params, state: State) -> None:
        self._lifetime = lifetime
        self._engine = engine
        self._params = params
        self._state = state

    @untraced
    @torch.no_grad()
    def sleep(self) -> None:
        """Does nothing if it is asleep."""
        self._lifetime.check_usable(asleep_too=True)
        self._state.await_snapshots()  # they hold memory
        with self._lifetime.whole():
            self._lifetime.check_usable(asleep_too=True)  # another thread may have closed it
            if not self._lifetime.asleep:
                self._fall_asleep()
        give_free_memory_back()

    def _fall_asleep(self) -> None:
        if self._engine.is_filling:
            raise StateError(
                "sleep(): gradients of this step have arrived and wait for step(), and their memory would be lost; "
                "call step() first, or zero_grad() to give them up"
            )
        self._engine.sleep()
        self._lifetime.work.rest()

    @untraced
    @torch.no_grad()
    def wake(self) -> None:
        """Does nothing if it is awake."""
        self._lifetime.check_usable(asleep_too=True)
        with self._lifetime.whole():
            self._lifetime.check_usable(asleep_too=True)
            if not self._lifetime.asleep:
                return
            with _still_asleep("give the parameter back the device, dtype, shape and order in memory that it had"):
                self._check_parameters()
                self._state.follow_written()
            with _still_asleep("free memory"):
                self._engine.wake()
            self._lifetime.work.go_on()

    def _check_parameters(self) -> None:
        for tracked in self._params:
            local = local_of(tracked.param)
            if tracked.shard.numel and not local.untyped_storage().nbytes():
                raise StateError(f"{tracked.shard.name}: its memory was freed; bring its values back")
            if tracked.plainly_written:
                tracked.check_still_fits()


@contextmanager
def _still_asleep(advice: str) -> Iterator[None]:
    """Adds to errors that nothing has changed, and what helps."""
    try:
        yield
    except SuperOffloadError as error:
        message = f"wake(): {error} -- the optimizer is still asleep; to wake it {advice} and call wake() again"
        raise type(error)(message) from error
