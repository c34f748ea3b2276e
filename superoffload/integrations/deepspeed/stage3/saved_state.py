"""Settles masters and moments before they are read or written, also for checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from superoffload.engine.bucket import Shard
from superoffload.errors import ArgumentError, StateError
from superoffload.host.signals import held_signals
from superoffload.integrations.deepspeed.driver import Partition, PartitionDriver
from superoffload.integrations.deepspeed.stage3.gradients import Gradients, Ranks
from superoffload.integrations.deepspeed.stage3.inner_optimizer import (
    MASTER,
    MOMENTS,
    InnerOptimizer,
    SubGroupState,
    check_values,
    overwrite,
)


class SavedState:
    """Shows readers the state of the last finished step, and takes what they load."""

    def __init__(
        self,
        driver: PartitionDriver,
        inner: InnerOptimizer,
        states: Sequence[SubGroupState],
        ranks: Ranks,
        gradients: Gradients,
    ) -> None:
        self._driver = driver
        self._inner = inner
        self._states = states
        self._ranks = ranks
        self._gradients = gradients

    def synchronize(self) -> None:
        """Returns once nothing runs: parameters, masters and moments are those of the last finished step."""
        self._gradients.wait()
        with held_signals():
            self._driver.engine.quiesce()

    # ---- one parameter's --------------------------------------------------------------------------------------

    def read(self, param: Any, moment: str | None) -> tuple[Tensor, int]:
        """Returns the partition of a moment (None: of the master) in fp32, with its padding, and its sub-group."""
        name = _name(moment)
        partition = self._settled(param)
        state = self._states[partition.sub_group]
        return state.partition(partition.shard, name), partition.sub_group

    def write_whole(self, param: Any, moment: str | None, value: Tensor) -> None:
        """Overwrites a moment (None: the master) by this rank's part of a tensor that has the parameter's elements."""
        if value.numel() != param.ds_numel:
            raise ArgumentError(f"value: {value.numel()} elements, expected the {param.ds_numel} of the parameter")
        name, shard = _name(moment), self._settled(param).shard
        _overwrite(shard, name, value.flatten()[shard.offset : shard.offset + shard.numel])

    def write_part(self, param: Any, moment: str | None, value: Tensor) -> None:
        """Overwrites a moment (None: the master) by this rank's partition, with its padding."""
        if value.numel() != param.ds_tensor.numel():
            raise ArgumentError(
                f"value: {value.numel()} elements, expected {param.ds_tensor.numel()}, a partition with its padding"
            )
        name, shard = _name(moment), self._settled(param).shard
        _overwrite(shard, name, value.flatten()[: shard.numel])

    def _settled(self, param: Any) -> Partition:
        """Brings one parameter's master and moments to the last finished step, so that they may be written."""
        self._gradients.wait()
        self._ranks.look()
        self._driver.settle(param.ds_id)
        return self._driver.partitions[param.ds_id]

    # ---- all of it ------------------------------------------------------------------------------------------------

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Takes over the state that DeepSpeed loads meanwhile."""
        try:
            with self.writing_masters(), self._inner.loading() as steps:
                yield
        except ArgumentError as error:  # found behind DeepSpeed's own load, which has changed parameters
            raise StateError(
                f"{error}. The checkpoint was loaded in part: load an undamaged one before anything else"
            ) from error
        self._driver.set_steps(steps)
        self._ranks.loaded(max(steps))

    @contextmanager
    def writing_masters(self) -> Iterator[None]:
        """Takes over what DeepSpeed writes into its flat fp32 buffers meanwhile; nothing of it if it raises."""
        try:
            for state in self._states:
                state.show_masters()
            yield
            for state in self._states:
                state.take_masters()
        finally:
            for state in self._states:
                state.hide_masters()

    def masters(self) -> list[Tensor] | None:
        """Copies the fp32 masters of all sub-groups; None: DeepSpeed's flat buffers have them."""
        if not any(state.split for state in self._states):
            return None
        return [state.whole(MASTER).requires_grad_() for state in self._states]

    def digests(self) -> dict[str, str]:
        """Returns SHA-256 of this rank's masters, moments and published partitions, as after the last finished step."""
        self.synchronize()
        return self._driver.engine.digests()


def _name(moment: str | None) -> str:
    if moment is None:
        return MASTER
    if moment not in MOMENTS:
        raise ArgumentError(f"optim_state_key={moment!r}: expected one of {', '.join(map(repr, MOMENTS))}")
    return moment


def _overwrite(shard: Shard, name: str, values: Tensor) -> None:
    check_values(shard, name, values)
    overwrite(shard, name, values)
