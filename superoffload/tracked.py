"""What is known of one parameter: its shard, and the user-visible versions of value and gradient we acted on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from superoffload.arguments import check_parameter
from superoffload.bits import WORD, checksum
from superoffload.bucket import Shard
from superoffload.checkpoint import ParamState
from superoffload.errors import StateError
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
    checksum: int = 0
    grad: Tensor | None = None  # the gradient that was handed to the core in this step
    grad_version: tuple[int, int] = UNKNOWN
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
        self.checksum = self._checksum()

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
        return self.plainly_written or self._checksum() != self.checksum

    @property
    def plainly_written(self) -> bool:
        """The same, as far as version counters show it; at no cost."""
        return version_of(self.param) != self.version or local_of(self.param).data_ptr() != self.address

    def _checksum(self) -> int:
        """Of a DTensor's bits, since operations on lists of them (torch._foreach_mul_) raise nobody's version."""
        if not is_dtensor(self.param):
            return 0
        return checksum(local_of(self.param).reshape(-1))

    @property
    def grad_changed(self) -> bool:
        return self.param.grad is not self.grad or (
            self.grad is not None and version_of(self.grad) != self.grad_version
        )

    def remember_grad(self, grad: Tensor) -> None:
        self.grad, self.grad_version = grad, version_of(grad)

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
        master = self.shard.master  # in host memory, or resident next to the parameter
        published = self.holding.part(self.param).to(master.device)
        word = WORD[published.dtype]
        same = published.view(word) == master.to(published.dtype).view(word)
        master.copy_(torch.where(same, master, published.to(torch.float32)))
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
