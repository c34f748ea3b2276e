"""State that is read, saved and loaded: digests, masters, ``state_dict()``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from superoffload.checkpoint import StateDict, read_state, write_state
from superoffload.errors import ArgumentError
from superoffload.masters import read_masters
from superoffload.optimizer.steps import Steps
from superoffload.ranks.layout import is_dtensor
from superoffload.ranks.spread import Spread, gather
from superoffload.tracked import notice

if TYPE_CHECKING:
    from superoffload.checkpoints.snapshot import Snapshot
    from superoffload.ranks.session import RankSession


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
        """Takes over what version counters show was written to parameters, as every ``step()`` does."""
        with self._whole():
            for tracked in notice(self._tracked.values()).written:
                self._refresh(tracked)

    def begin_snapshot(self, snapshot: Snapshot) -> None:
        """From here on every shard is protected before it changes. For superoffload.checkpoints."""
        self._core.settle()
        self._core.snapshot = snapshot

    def end_snapshot(self) -> None:
        """Waits until an earlier snapshot was read."""
        if self._core.snapshot is not None:
            self._core.snapshot.wait()
            self._core.snapshot = None

    def refresh_masters(self) -> None:
        """Takes over parameters that were written by others. Done by itself where version counters show the write;
        needed only after writes that they cannot show (through ``param.data`` or foreign memory)."""
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
            for param, name in self._names_of(index)
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
        with self._whole():
            self._abandon()
            self._core.quiesce()
            self.end_snapshot()
            self._has_masters = True
            for param, value in values:
                tracked = self._tracked[param]
                tracked.shard.master.copy_(value)
                tracked.remember_value()

    def state_dict(self) -> StateDict:
        """``torch.optim.AdamW``'s layout plus ``master`` per parameter, as after the last finished step.

        DTensors for DTensor parameters. State that is spread over ranks (``replicated="shard"``) is gathered, so then
        all ranks must call this.
        """
        self.synchronize()
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
        Tensors of the parameters' full shapes fit any number of ranks.
        """
        self._check_usable()
        session = self._ranks.session
        try:
            read = read_state(state_dict, self.param_groups, part_of=self._part_of)
        except Exception as error:
            if session is not None:
                session.agree("load_state_dict()", error)
            raise
        if session is not None:
            session.agree("load_state_dict()", None)
        with self._whole():
            self._abandon()
            self._core.quiesce()
            self.end_snapshot()
            states = iter(read.states)
            for index, group in enumerate(self.param_groups):
                group.update(read.groups[index])
                found = {param: next(states) for param in group["params"]}
                self._adopt(index, [param for param, values in found.items() if values is not None])
                for param, values in found.items():
                    if param in self._tracked:
                        self._tracked[param].load(values)
            self._announce()
            if session is not None:
                session.loaded(max((tracked.shard.steps for tracked in self._tracked.values()), default=0))

    def _part_of(self, param: Tensor, value: Tensor) -> Tensor:
        tracked = self._tracked.get(param)
        holding = tracked.holding if tracked is not None else self._ranks.holding_of("state_dict", param)
        if not is_dtensor(value):
            return holding.part_of_whole(value)
        if not is_dtensor(param) or value.placements != param.placements or value.device_mesh != param.device_mesh:
            raise ArgumentError(
                f"state_dict: a DTensor with placements {value.placements} over {value.device_mesh}, expected those of "
                "the parameter; pass full tensors, or load it with torch.distributed.checkpoint"
            )
        return holding.part(value)
