"""Ends a window: makes every gradient final, finds the norm over all ranks or raises on all of them, and steps all
sub-groups by one verdict.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from superoffload.engine.verdict import Verdict
from superoffload.errors import ArgumentError, RankError, WorkerError
from superoffload.integrations.deepspeed.driver import PartitionDriver, Window
from superoffload.integrations.deepspeed.zero.gradients import Failures, Ranks
from superoffload.integrations.deepspeed.zero.inner_optimizer import InnerOptimizer
from superoffload.integrations.deepspeed.zero.stock import Layout, Stock, trained

# ---- norm, clip and loss scale --------------------------------------------------------------------------------------
# The norm is made from our sums, or as stock does ("match_stock").


def clip(norm: Tensor, scale: float, threshold: float) -> tuple[float, float]:
    """Computes clip coefficient and gradient factor by DeepSpeed's formula, in the precision of ``norm``."""
    if not threshold > 0.0:
        return 1.0, 1.0 / scale
    above = torch.clamp((norm / scale + 1e-6) / threshold, min=1.0)
    return float(1.0 / above), float(1.0 / (above * scale))


class Formulas(Protocol):
    """Computes a window's norm and the loss scale that divides its gradients."""

    def norm(self, window: Window, total: float) -> Tensor:
        """Returns the norm of the scaled gradients over all ranks; infinite: skip the step. ``total``: its square."""

    def scale(self, before: float) -> float:
        """Returns the loss scale, after DeepSpeed has chosen the next one. ``before``: that of the window."""

    def scale_of_norm(self, before: float) -> float:
        """Returns the one that divides the norm that is reported."""


class OurFormulas:
    """Takes the norm from fp64 sums, and the scale of the window."""

    def norm(self, window: Window, total: float) -> Tensor:
        return torch.tensor(math.sqrt(total), dtype=torch.float64, device="cpu")

    def scale(self, before: float) -> float:
        return before

    def scale_of_norm(self, before: float) -> float:
        return before


@dataclass(eq=False, repr=False)
class StockFormulas:
    """Takes DeepSpeed's norm (per parameter, per sub-group, in fp32) and the scale of the next step."""

    _stock: Stock
    _layout: Layout
    _driver: PartitionDriver

    def norm(self, window: Window, total: float) -> Tensor:
        stock = self._stock
        if stock.dtype == torch.float16 and self._layout.overflowed(not math.isfinite(window.sum_of_squares)):
            return torch.tensor(math.inf, device="cpu")
        for param in trained(self._layout):
            partition = self._driver.partitions[self._layout.key(param)]
            if partition.arrivals and partition.shard.numel:
                stock.norm_for_param_grads[stock.get_param_id(param)] = self._layout.norm_of(partition.gradient)
        norms = torch.stack([_as_tensor(norm) for norm in self._layout.norms_of_groups()])
        if bool((~torch.isfinite(norms) | (norms < 0)).any()):
            return torch.tensor(math.inf, device="cpu")
        combined: Tensor = torch.linalg.vector_norm(norms)
        return combined

    def scale(self, before: float) -> float:
        return float(self._stock.loss_scale)

    def scale_of_norm(self, before: float) -> float:
        return before if self._layout.keeps_norm_scale else self.scale(before)


def _as_tensor(norm: Any) -> Tensor:
    """Makes a tensor of a norm, which may be a number, or a tensor on the accelerator."""
    return norm.to(torch.float32) if isinstance(norm, Tensor) else torch.tensor(norm, dtype=torch.float32, device="cpu")


def _fold(sums: Sequence[float]) -> float:
    """Adds up the sums of all ranks, in their order, so that the total has the same bits on all of them."""
    total = sum(sums)
    return total if math.isfinite(total) else math.inf


# ---- the end of a window --------------------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class WindowEnd:
    """Closes a window on all ranks, or abandons it on all of them."""

    _layout: Layout
    _driver: PartitionDriver
    _ranks: Ranks
    _failures: Failures
    _formulas: Formulas

    def __post_init__(self) -> None:
        self._weights_are_checked = False
        partitions = self._driver.partitions
        copies = [param for param in trained(self._layout) if not self._layout.is_counted(param)]
        self._not_counted = {partitions[self._layout.key(param)].shard.index for param in copies}

    def close(self) -> tuple[Window, Tensor]:
        """Returns this rank's window, and the norm of the scaled gradients over all ranks."""
        frozen = {self._layout.key(param) for param in trained(self._layout) if not param.requires_grad}
        self._ranks.begin()
        window = Window({})
        with self._failures.kept():
            self._ranks.look()
            window = self._driver.close_window(lambda key: key not in frozen)
        failure = self._failures.take()
        try:
            if failure is not None:
                raise WorkerError(f"{failure}; no rank stepped")
            self._check_weights()
            counted = {index: value for index, value in window.sums.items() if index not in self._not_counted}
            total = _fold(self._ranks.exchange(Window(counted)))
        except (ArgumentError, WorkerError, RankError):
            self._ranks.fail()
            self._driver.abandon()
            raise
        return window, self._formulas.norm(window, total)

    def _check_weights(self) -> None:
        """Checks published values in the first step, so that a checkpoint may still replace uninitialized memory.
        Masters may have been stepped already with a gradient that is not finite."""
        if self._weights_are_checked:
            return
        for partition in self._driver.partitions.values():
            shard = partition.shard
            bad = shard.numel - int(torch.isfinite(shard.target()).sum())
            if bad:
                raise ArgumentError(
                    f"{shard.name}: {bad} of the {shard.numel} values that this rank has are NaN or infinite before "
                    "the first step; initialize it first. No rank stepped"
                )
        self._weights_are_checked = True


@dataclass(eq=False, repr=False)
class Steps:
    """Makes DeepSpeed's norm, clip and loss scale a verdict and has the engine act on it."""

    _stock: Stock
    _driver: PartitionDriver
    _inner: InnerOptimizer
    _ranks: Ranks
    _failures: Failures
    _may_wait: bool  # on demand; not where ranks outnumber processors: to deliver later would only slow other ranks
    _later: bool = False

    @property
    def later(self) -> bool:
        """Tells whether parameters of the last step may still be undelivered."""
        return self._later

    def skip(self, scale: float) -> None:
        """Skips a step, since a gradient was not finite: nothing changes. ``scale``: the loss scale of the window."""
        self._later = False
        with self._failures.kept():
            self._driver.step(Verdict(math.inf, 1.0, True, 1.0 / scale), later=False)
        self._ranks.ended(applied=False, factor=1.0 / scale)

    def apply(self, window: Window, norm: Tensor, grad_norm: float, *, expected: float, scale: float) -> None:
        """Divides gradients by ``scale``, clips and steps; ``expected``: the scale that speculation has used."""
        self._later = False
        if window.sums:
            speculating = self._driver.engine.schedule.should_speculate()
            coefficient, factor = clip(norm, scale, self._stock.clip_grad)
            # If backward has done the work, nothing is left to deliver later, and persistent parameters are gathered
            # together. This rank's own progress must not decide: all ranks must gather alike.
            self._later = self._may_wait and not (speculating and factor == 1.0 / expected)
            with self._failures.kept():  # the step was completed even so
                self._driver.step(Verdict(grad_norm, coefficient, False, factor), later=self._later)
            self._ranks.ended(applied=True, factor=factor)
        self._inner.show_steps(self._driver.steps)
        self._inner.stepped()
