"""Finds, in ``step()``, gradients and parameters that the user has edited since backward, and uses their new values.

A parameter that was written before its gradient arrived is found earlier, in intake.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from superoffload.engine.engine import Engine
from superoffload.errors import DeviceError
from superoffload.host.tensors import is_dtensor
from superoffload.optimizer.accumulation import Accumulation
from superoffload.optimizer.advice import Advice, EditAdvice
from superoffload.optimizer.gradient_source import check_one_gradient, gradient_of, lay_out_like
from superoffload.optimizer.intake import Intake
from superoffload.optimizer.master_updates import MasterUpdates
from superoffload.optimizer.params import Params
from superoffload.optimizer.placeholder import packed_in
from superoffload.optimizer.tracked_param import FoundEdits, TrackedParam, find_edits, unedited, unwritten


@dataclass(eq=False, repr=False)
class Edits:
    """Has the engine use the gradients and parameters that the user has at ``step()``."""

    _engine: Engine
    _params: Params
    _intake: Intake
    _master_updates: MasterUpdates
    _accumulation: Accumulation
    _advice: Advice

    def __post_init__(self) -> None:
        self._edited = EditAdvice(self._advice)

    def begin(self) -> None:
        """Notes which buckets were speculated, before the first gradient is retracted."""
        self._edited.begin(self._engine.buckets)
        if self._engine.link.in_place and self._engine.is_filling:
            self.all_edited()  # taken by a step() that failed; where gradients and parameters are may have changed

    def all_edited(self) -> None:
        """Retracts every gradient, since all were edited in a way that version counters do not show."""
        for tracked in self._params:
            self._retract(tracked)

    def collect(self) -> None:
        engine, intake = self._engine, self._intake
        self._accumulation.step_begins(self._advice)
        intake.hook()
        for tracked in self._params:
            if tracked.is_dtensor:
                lay_out_like(tracked.param)
        alike, others = unedited(self._params, engine.inbox.arrived)
        others += unwritten(alike)[1]
        found = self._find(others)
        self._master_updates.advise_of(found.unversioned)
        late = []
        for tracked in others:
            if tracked.gradient.reduced is not None:
                self._adopt_reduced(tracked)
            if engine.has_gradient(tracked.shard) and (tracked in found.edited or self.is_edited(tracked)):
                self._retract(tracked)
            if tracked in found.written:
                self._master_updates.follow(tracked)
            check_one_gradient(tracked.shard.name, tracked.param)
            if gradient_of(tracked.param) is not None and not engine.has_gradient(tracked.shard):
                late.append(tracked)
        intake.take_missing(late)
        self._edited.end()

    def is_edited(self, tracked: TrackedParam) -> bool:
        """Returns whether the gradient differs from the one that the engine has.

        Operations on lists of DTensors (torch._foreach_mul_, and so clip_grad_norm_) raise no version. There the bits
        are compared, unless ``find_edits`` has done that.
        """
        grad = gradient_of(tracked.param)
        if grad is None or tracked.gradient.plainly_changed:
            return True
        packed = packed_in(grad)
        if packed is None:
            unseen = is_dtensor(grad) and tracked.gradient.sums is None
            unknown = self._engine.packer.packed_sums(tracked.shard) is None if tracked.shard.sums_gradient else unseen
        else:  # brought back, then written with the same sums: by a clip that clips nothing, or a swap of elements
            unknown = packed.in_memory is not None and tracked.gradient.was_written(grad)
        return unknown and not self._engine.packer.gradient_is(tracked.shard, tracked.holding.part_of_gradient(grad))

    def _find(self, several: Sequence[TrackedParam]) -> FoundEdits:
        """Finds what was written and edited. Where a device cannot tell, it brings masters to the last finished step;
        lost gradients raise an error of their own."""
        try:
            return find_edits(several, self._engine.packer.packed_sums)
        except DeviceError:
            self._engine.quiesce()
            raise

    def _retract(self, tracked: TrackedParam) -> None:
        if gradient_of(tracked.param) is not None:
            self._edited.edited(tracked.shard)
        self._intake.retract(tracked)

    def _adopt_reduced(self, tracked: TrackedParam) -> None:
        """Remembers ``p.grad`` in place of a reduced gradient, or retracts that if the bits differ: it was edited."""
        tracked.gradient.forget_reduced()
        grad = tracked.param.grad
        if grad is not None and self._engine.has_gradient(tracked.shard):
            if self._engine.packer.gradient_is(tracked.shard, tracked.holding.part_of_gradient(grad)):
                tracked.gradient.remember(grad)
            else:
                self._retract(tracked)
