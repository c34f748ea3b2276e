"""What is known of one parameter: its shard, and the user-visible versions of value and gradient we acted on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from superoffload.arguments import check_parameter
from superoffload.bits import differing, run_sums
from superoffload.bucket import Shard
from superoffload.checkpoint import ParamState
from superoffload.errors import StateError
from superoffload.masters import follow
from superoffload.packed_gradient import PackedGradient
from superoffload.ranks.layout import Holding, is_dtensor, local_of, version_of

UNKNOWN = (-1, -1)


@dataclass(eq=False)
class Tracked:
    """A parameter, its shard, and what we last saw of both value and gradient."""

    param: Tensor
    shard: Shard
    step: Tensor  # what state[p]["step"] shows
    holding: Holding  # which elements of the parameter the shard is
    early: bool = True  # the gradient is final when its hook runs (not where somebody reduces it over ranks later)
    version: tuple[int, int] = UNKNOWN
    address: int = 0
    sums: Tensor | None = None  # of a DTensor's bits, on its device
    grad: Tensor | None = None  # the gradient that was handed to the core in this step
    grad_version: tuple[int, int] = UNKNOWN
    grad_sums: Tensor | None = None  # of its bits, where the core has it on another device
    reduced: Tensor | None = None  # what a reduction gave and the core has; p.grad must turn out to be the same
    stand_in: PackedGradient | None = None  # what stands in p.grad once the gradient was packed and freed
    arrivals: int = 0  # backward passes that reached it since the last step
    expected: int = 1  # as many as in the step before
    shown_steps: int = 0
    hook: RemovableHandle | None = None  # None while it is frozen

    def __post_init__(self) -> None:
        self._device = local_of(self.param).device

    def remember_value(self) -> None:
        self.version = version_of(self.param)
        self.address = local_of(self.param).data_ptr()
        self.sums = self._sums()

    def outdate(self) -> None:
        """A new value is to be delivered later: graphs that still need the old one must not be used any more."""
        if not is_dtensor(self.param):  # of a DTensor, graphs hold what was gathered of it
            torch.autograd.graph.increment_version(self.param)
            self.version = version_of(self.param)

    def forget_value(self) -> None:
        """Whatever the parameter has counts as written by somebody else."""
        self.version = UNKNOWN

    @property
    def written(self) -> bool:
        """Whether somebody else wrote to the parameter since we last looked."""
        return bool(notice([self]).written)

    @property
    def plainly_written(self) -> bool:
        """The same, as far as version counters show it; at no cost."""
        return version_of(self.param) != self.version or local_of(self.param).data_ptr() != self.address

    def _sums(self) -> Tensor | None:
        """Of a DTensor's bits, since operations on lists of them (torch._foreach_mul_) raise nobody's version."""
        if not is_dtensor(self.param):
            return None
        return run_sums(local_of(self.param).reshape(-1))

    @property
    def grad_changed(self) -> bool:
        """As far as it shows without a look at bits.

        Versions of DTensors show nothing: an operation on lists of them raises none, and FSDP2, where it accumulates
        gradients, raises those of all parameters that it reduces together, which share one buffer and its counter.
        """
        if self.param.grad is not self.grad:
            return True
        return self.grad is not None and not is_dtensor(self.grad) and version_of(self.grad) != self.grad_version

    def remember_grad(self, grad: Tensor, *, summed: bool = False) -> None:
        """``summed``: a DTensor whose bits cannot be compared with what the core has but for a copy."""
        self.grad, self.grad_version = grad, version_of(grad)
        self.grad_sums = run_sums(self.holding.part(grad)) if summed and is_dtensor(grad) else None

    def check_still_fits(self) -> None:
        """Raises where the parameter was converted or resized since the optimizer was made."""
        param, shard = self.param, self.shard
        check_parameter(shard.name, param)
        device = local_of(param).device
        if device != self._device:
            raise StateError(
                f"{shard.name}: was on {self._device}, now on {device}; make the optimizer after moving the model"
            )
        numel = self.holding.part(param).numel()
        if param.dtype != shard.published_dtype or numel != shard.numel:
            raise StateError(
                f"{shard.name}: was {shard.numel} elements of {shard.published_dtype}, now {numel} of "
                f"{param.dtype}; make a new optimizer after converting or resizing a model"
            )

    def refresh_master(self) -> None:
        """Takes over what somebody wrote to the parameter; elements that still are round(master) keep their master."""
        follow(self.shard.master, self.holding.part(self.param))
        self.remember_value()

    def load(self, values: ParamState | None) -> None:
        """State from a checkpoint; ``None``: as before the first step."""
        shard, published = self.shard, self.holding.part(self.param)
        shard.steps = self.shown_steps = values.step if values else 0
        self.step.fill_(float(shard.steps))
        if values is None:
            shard.exp_avg.zero_()
            shard.exp_avg_sq.zero_()
            shard.master.copy_(published)
        else:
            shard.exp_avg.copy_(values.exp_avg)
            shard.exp_avg_sq.copy_(values.exp_avg_sq)
            shard.master.copy_(published if values.master is None else values.master)
        self.forget_value()  # compare with the parameter at the next opportunity


@dataclass(frozen=True)
class Noticed:
    """Whose value, and whose kept gradient, somebody has edited since we last looked."""

    written: frozenset[Tracked]
    edited: frozenset[Tracked]


def notice(several: Iterable[Tracked]) -> Noticed:
    """By version counters, and where those do not show everything, by bits: a device is waited for once for all."""
    written: set[Tracked] = set()
    edited: set[Tracked] = set()
    compared: list[tuple[set[Tracked], Tracked]] = []  # where it belongs if its bits have changed
    before: list[Tensor] = []
    now: list[Tensor] = []
    for tracked in several:
        if tracked.plainly_written:
            written.add(tracked)
        elif tracked.sums is not None and (sums := tracked._sums()) is not None:
            compared.append((written, tracked))
            before.append(tracked.sums)
            now.append(sums)
        if tracked.grad is not None and tracked.grad_sums is not None and not tracked.grad_changed:
            compared.append((edited, tracked))
            before.append(tracked.grad_sums)
            now.append(run_sums(tracked.holding.part(tracked.grad)))
    for (found, tracked), differs in zip(compared, differing(before, now), strict=True):
        if differs:
            found.add(tracked)
    return Noticed(frozenset(written), frozenset(edited))
