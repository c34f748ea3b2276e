"""State that is read, saved and loaded: digests, masters, ``state_dict()``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from superoffload.checkpoint import ParamState, ReadState, StateDict, read_state, write_state
from superoffload.errors import ArgumentError, StateError
from superoffload.masters import read_masters
from superoffload.optimizer.steps import Steps
from superoffload.ranks.layout import Holding, is_dtensor
from superoffload.ranks.spread import Spread, gather
from superoffload.tracked import Tracked, notice

if TYPE_CHECKING:
    from superoffload.checkpoints.snapshot import Snapshot
    from superoffload.ranks.session import RankSession


def loaded_in_part(what: str, error: Exception) -> StateError:
    """``error`` came after something was changed, though all had been checked before."""
    return StateError(
        f"{what}: {error} -- this was in order when it was checked before. Model and optimizer are loaded in part: "
        "load a whole checkpoint before anything else"
    )


class SavedState(Steps):
    """What users read of the state, and what they put in its place."""

    def state_digests(self) -> dict[str, str]:
        """SHA-256 of all masters, exp_avg, exp_avg_sq and published parameters, as after the last finished step."""
        self._check_usable(closed_too=True)
        with self._whole():
            return self._core.digests()

    def synchronize(self) -> None:
        """Returns once nothing runs: masters and moments are those of the last finished step."""
        self._check_usable(closed_too=True)
        with self._whole():
            self._core.quiesce()

    def refresh_written(self) -> None:
        """Takes over what was written to parameters, as every ``step()`` does."""
        with self._whole():
            self._refresh_written(notice(self._tracked.values()))
        self._advice.tell()

    def begin_snapshot(self, snapshot: Snapshot) -> None:
        """From here on every shard is protected before it changes. For superoffload.checkpoints."""
        with self._whole():
            self._core.quiesce()  # also what backward in another thread has speculated by now
            self._core.snapshots.add(snapshot)

    def await_snapshots(self) -> None:
        """Waits until earlier snapshots were read. Signals are not held, since that takes as long as the disk. One that
        this thread reads itself goes on when the signal's handler that we are called from has returned."""
        for snapshot in list(self._core.snapshots):
            if not snapshot.is_read_here:
                snapshot.wait()

    def refresh_masters(self) -> None:
        """Takes over parameters that were written by others, at once. ``step()`` does that by itself with writes that
        it notices: all that version counters show, those through ``param.data`` in host memory, and on a device those
        of the first steps and of every 16th (docs/edits.md)."""
        self._check_usable()
        with self._whole():
            for tracked in self._tracked.values():
                self._refresh(tracked)

    @torch.no_grad()
    def load_masters(self, masters: Mapping[str, Tensor] | Sequence[Tensor]) -> None:
        """Masters that keep the bits a model had before it was converted: float32 values by name, or in order.

        The parameters must be their rounding, as after ``model.bfloat16()``. Names are those of the model given as
        ``model=``, or of named parameters; names that are no parameters of the optimizer are left out of account.
        """
        self._check_usable()
        session = self._ranks.session
        params = [
            (name, param)
            for index in range(len(self.param_groups))
            for name, param in self._names_of(index)
            if param in self._tracked
        ]
        try:
            values = read_masters(masters, params, self._part_of)
        except ArgumentError as error:
            if session is not None:
                session.agree("load_masters()", error)
            raise
        if session is not None:
            session.agree("load_masters()", None)
        self.await_snapshots()
        with self._whole():
            self._abandon()
            self._core.quiesce()
            self._has_masters = True
            for param, value in values:
                tracked = self._tracked[param]
                self._core.protect([tracked.shard])
                tracked.shard.master.copy_(value)
                tracked.remember_value()

    def state_dict(self) -> StateDict:
        """``torch.optim.AdamW``'s layout plus ``master`` per parameter, as after the last finished step.

        A copy, in host memory: as many bytes again as ``exp_avg``, ``exp_avg_sq`` and masters have;
        ``superoffload.checkpoints.save`` needs none. DTensors for DTensor parameters. State that is spread over ranks
        (``replicated="shard"``) is gathered, so then all ranks must call this.
        """
        self._check_usable(closed_too=True)
        with self._work.alone:  # also while it is copied, or backward in another thread would change it
            with self._whole():
                self._core.quiesce()
            state_dict = write_state(super().state_dict())
        session = self._ranks.session
        if session is not None:
            self._gather_state(session, state_dict)
        return state_dict

    def _gather_state(self, session: RankSession, state_dict: StateDict) -> None:
        spreads = []
        params = [param for group in self.param_groups for param in group["params"]]
        for position, values in state_dict["state"].items():
            tracked = self._tracked.get(params[position])
            if tracked is None or tracked.holding.kind != "spread":
                continue
            for name in ("exp_avg", "exp_avg_sq", "master"):
                part = values[name]
                whole = torch.empty(tracked.param.numel(), dtype=part.dtype)
                tracked.holding.own.of(whole).copy_(part)
                values[name] = whole.view(tracked.param.shape)
                spreads.append(Spread(tracked.holding, part, whole))
        if spreads:
            gather(session.group, "state_dict()", spreads)

    @torch.no_grad()
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads our own or ``torch.optim.AdamW``'s; all of it is checked before anything changes, on any rank.

        Where a checkpoint has no masters, or the model's parameters are not their rounding, the parameters win.
        Tensors of the parameters' full shapes fit any number of ranks. Values go into the state there is, block by
        block, so no memory is needed beside ``state_dict`` itself.
        """
        session = self._ranks.session
        try:
            read = self.check_state_dict(state_dict)
        except Exception as error:
            if session is not None:
                session.agree("load_state_dict()", error)
            raise
        if session is not None:
            session.agree("load_state_dict()", None)
        self.take_over(read, "load_state_dict()")

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> ReadState:
        """What ``take_over`` takes; raises and changes nothing where it does not fit. For superoffload.checkpoints."""
        self._check_usable(to_load=True)
        with self._whole():
            self._core.quiesce()  # what has failed since the last step is told before anything changes
        return read_state(state_dict, self.param_groups, part_of=self._part_of)

    @torch.no_grad()
    def take_over(self, read: ReadState, what: str, rest: Callable[[], None] | None = None) -> None:
        """Puts checked state in the place of ours, then calls ``rest``, which loads what belongs to it; collectively.

        Where that fails on any rank, all of them refuse everything but another load. For superoffload.checkpoints.
        Signals and other threads wait, since what is loaded in part is of no use.
        """
        self.await_snapshots()
        with self._work.alone:
            self._partly_loaded = True
            error: Exception | None = None
            try:
                self._stream(read)
                if rest is not None:
                    rest()
            except Exception as failed:
                error = failed
            session = self._ranks.session
            if session is not None:
                left = "the state is loaded in part, everywhere; load a whole checkpoint on all ranks"
                session.agree(what, error, left)
            if error is not None:
                raise loaded_in_part(what, error) from error
            self._announce()
            if session is not None:
                session.loaded(max((tracked.shard.steps for tracked in self._tracked.values()), default=0))
            self._partly_loaded = False

    def _stream(self, read: ReadState) -> None:
        with self._whole():
            self._abandon()
            self._core.quiesce()
            found = self._adopt_loaded(read)
        for tracked, values in found:
            self._core.protect([tracked.shard])
            tracked.load(values)

    def _adopt_loaded(self, read: ReadState) -> list[tuple[Tracked, ParamState | None]]:
        """Group values, and state for parameters that get some and had none; whose values are to be loaded."""
        states = iter(read.states)
        loaded: list[tuple[Tracked, ParamState | None]] = []
        for index, group in enumerate(self.param_groups):
            group.update(read.groups[index])
            found = {param: next(states) for param in group["params"]}
            self._adopt(index, [param for param, values in found.items() if values is not None])
            loaded += [(self._tracked[param], values) for param, values in found.items() if param in self._tracked]
        return loaded

    def holding_of(self, param: Tensor) -> Holding:
        """The part of a parameter whose state this rank has, or would have if it trained."""
        tracked = self._tracked.get(param)
        return tracked.holding if tracked is not None else self._ranks.holding_of("state_dict", param)

    def _part_of(self, param: Tensor, value: Tensor) -> Tensor:
        holding = self.holding_of(param)
        if not is_dtensor(value):
            return holding.part_of_whole(value)
        if not is_dtensor(param) or value.placements != param.placements or value.device_mesh != param.device_mesh:
            raise ArgumentError(
                f"state_dict: a DTensor with placements {value.placements} over {value.device_mesh}, expected those of "
                "the parameter; pass full tensors, or load it with torch.distributed.checkpoint"
            )
        return holding.part(value)
