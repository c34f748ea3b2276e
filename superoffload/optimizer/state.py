"""Reads, saves and loads masters and moments, for users and for checkpoints; and an optimizer sleeps.

state_dict.py has the saved form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from superoffload.distributed.gather import Spread
from superoffload.engine.engine import Engine
from superoffload.errors import StateError, SuperOffloadError
from superoffload.host.memory import give_free_memory_back
from superoffload.host.tensors import local_of, outside_inference
from superoffload.optimizer.intake import Intake
from superoffload.optimizer.lifetime import Lifetime
from superoffload.optimizer.master_updates import MasterUpdates
from superoffload.optimizer.other_ranks import Ranks
from superoffload.optimizer.params import Params
from superoffload.optimizer.settings import ParamGroups
from superoffload.optimizer.state_dict import (
    ParamState,
    ReadState,
    StateDict,
    part_of,
    read_masters,
    read_state,
    write_state,
)
from superoffload.optimizer.step import Step
from superoffload.optimizer.tracked_param import TrackedParam, find_edits

if TYPE_CHECKING:
    from superoffload.engine.snapshot import Snapshot

_Read = TypeVar("_Read")


def loaded_in_part(what: str, error: Exception) -> StateError:
    """Returns the error for a load that fails after it has changed something, though all was checked before."""
    return StateError(
        f"{what}: {error} -- the check before the load had passed. Model and optimizer are loaded in part: "
        "load a whole checkpoint before anything else"
    )


def agreed(ranks: Ranks, what: str, read: Callable[[], _Read]) -> _Read:
    """Returns ``read()``, which changes nothing; if it raises on one rank, all ranks raise."""
    try:
        found = read()
    except Exception as error:
        ranks.agree(what, error)
        raise
    ranks.agree(what, None)
    return found


@dataclass(eq=False, repr=False)
class State:
    """Reads and loads masters and moments for users and checkpoints."""

    _lifetime: Lifetime
    _engine: Engine
    _groups: ParamGroups
    _params: Params
    _ranks: Ranks
    _intake: Intake
    _step: Step
    _master_updates: MasterUpdates

    # ---- as of the last finished step -------------------------------------------------------------------------

    def digests(self) -> dict[str, str]:
        with self._lifetime.whole():
            self._quiesce()
            return self._engine.digests()

    def quiesce(self) -> None:
        with self._lifetime.whole():
            self._quiesce()

    def _quiesce(self) -> None:
        self._intake.follow_waiting()
        self._engine.quiesce()
        self._params.follow_state_edits()

    def begin_snapshot(self, snapshot: Snapshot) -> None:
        """Registers ``snapshot``: it reads or copies every shard before the shard changes."""
        with self._lifetime.whole():
            self._quiesce()  # backward in another thread may have speculated by now
            self._engine.snapshots.add(snapshot)

    def await_snapshots(self) -> None:
        """Waits until earlier snapshots were read; signals are not held, since a disk may be slow. It skips one
        that this thread reads: a signal handler calls us then, and would wait for itself."""
        for snapshot in list(self._engine.snapshots):
            if not snapshot.is_read_here:
                snapshot.wait()

    # ---- masters ----------------------------------------------------------------------------------------------

    @outside_inference
    def follow_written(self) -> None:
        """Has masters take over writes to parameters that are noticed, as every ``step()`` does."""
        with self._lifetime.whole():
            self._master_updates.follow_all(find_edits(self._params))

    def follow_parameters(self) -> None:
        """Has all masters follow their parameters."""
        with self._lifetime.whole():
            for tracked in self._params:
                self._master_updates.follow(tracked)

    def load_masters(self, masters: Mapping[str, Tensor] | Sequence[Tensor]) -> None:
        params = [
            (name, param)
            for index in range(len(self._groups.now))
            for name, param in self._params.named(index)
            if param in self._params
        ]
        values = agreed(self._ranks, "load_masters()", lambda: read_masters(masters, params, self._part_of))
        self.await_snapshots()
        with self._lifetime.whole():
            self._step.abandon()
            self._engine.quiesce()
            self._engine.link.await_copies()  # as in a load
            self._params.keep_masters()
            for param, value in values:
                tracked = self._params[param]
                self._engine.snapshots.protect([tracked.shard])
                tracked.shard.write_masters(value)
                tracked.remember_value()

    # ---- saved ------------------------------------------------------------------------------------------------

    def as_dict(self, of_torch: Callable[[], StateDict], *, copy: bool) -> StateDict:
        """Returns a copy of ``of_torch()``, or its tensors, in which state that is spread over ranks is whole."""
        with self._lifetime.alone:  # backward in another thread would change the state during the copy
            self.quiesce()
            with self._params.shown_alone():
                state_dict = write_state(of_torch(), copy=copy)
        self._ranks.gather("state_dict()", self._made_whole(state_dict))
        return state_dict

    def _made_whole(self, state_dict: StateDict) -> list[Spread]:
        """Makes room in ``state_dict`` for the parts that other ranks have; returns what must be gathered."""
        spreads = []
        params = self._groups.params()
        for position, values in state_dict["state"].items():
            tracked = self._params.get(params[position])
            if tracked is None or tracked.holding.kind != "spread":
                continue
            for name in ("exp_avg", "exp_avg_sq", "master"):
                part = values[name]
                whole = torch.empty(tracked.param.numel(), dtype=part.dtype, device="cpu")
                tracked.holding.box.of(whole).copy_(part)
                values[name] = whole.view(tracked.param.shape)
                spreads.append(Spread(tracked.holding, part, whole))
        return spreads

    # ---- loaded -----------------------------------------------------------------------------------------------

    def check(self, state_dict: Mapping[str, Any]) -> ReadState:
        """Returns the argument of ``take_over``; raises and changes nothing where ``state_dict`` does not fit."""
        with self._lifetime.whole():
            self._engine.quiesce()  # raises failures since the last step before anything changes
        return read_state(state_dict, self._groups.now, part_of=self._part_of)

    @outside_inference
    @torch.no_grad()
    def take_over(self, read: ReadState, what: str, rest: Callable[[], None] = lambda: None) -> None:
        """Replaces the state by checked state, then calls ``rest`` to load what belongs to it; collectively.

        If this fails on any rank, all ranks refuse every call but another load. Signals and other threads wait, since
        a state that is loaded in part cannot be used.
        """
        self.await_snapshots()
        with self._lifetime.alone, self._lifetime.loading():
            error: Exception | None = None
            try:
                self._stream(read)
                rest()
            except Exception as failed:
                error = failed
            left = "the state is loaded in part, everywhere; load a whole checkpoint on all ranks"
            self._ranks.agree(what, error, left)
            if error is not None:
                raise loaded_in_part(what, error) from error
            self._ranks.announce()
            self._ranks.loaded()

    def _stream(self, read: ReadState) -> None:
        with self._lifetime.whole():
            self._step.abandon()
            self._engine.quiesce()
            self._engine.link.await_copies()  # or the parameters of the last step might get the loaded values
            self._params.show_all_again()
            found = self.adopt_loaded(read)
        for tracked, values in found:
            self._engine.snapshots.protect([tracked.shard])
            tracked.load(values)

    def adopt_loaded(self, read: ReadState) -> list[tuple[TrackedParam, ParamState | None]]:
        """Updates groups and makes missing state; returns the parameters with state and the values to load."""
        states = iter(read.states)
        loaded: list[tuple[TrackedParam, ParamState | None]] = []
        for index, group in enumerate(self._groups.now):
            group.update(read.groups[index])
            found = {param: next(states) for param in group["params"]}
            self._intake.adopt(index, [param for param, values in found.items() if values is not None])
            loaded += [(self._params[param], values) for param, values in found.items() if param in self._params]
        return loaded

    def _part_of(self, param: Tensor, value: Tensor) -> Tensor:
        return part_of(param, self._params.holding_of(param), value)


@dataclass(eq=False, repr=False)
class Sleep:
    """Between generation and training the engine gives back all memory but masters and moments, and takes it again.
    Both need no other rank."""

    _lifetime: Lifetime
    _engine: Engine
    _params: Params
    _state: State

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
