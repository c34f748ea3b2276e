"""Computes a verdict's norm, clip and loss scale; the norm from our sums, or as stock does (``"match_stock"``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from superoffload.integrations.deepspeed.driver import PartitionDriver, Window
from superoffload.integrations.deepspeed.stage3.stock import StockStage3, trained


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


class OurFormulas:
    """Takes the norm from fp64 sums, and the scale of the window."""

    def norm(self, window: Window, total: float) -> Tensor:
        return torch.tensor(math.sqrt(total), dtype=torch.float64, device="cpu")

    def scale(self, before: float) -> float:
        return before


class StockFormulas:
    """Takes DeepSpeed's norm (per parameter, per sub-group, in fp32) and the scale of the next step."""

    def __init__(
        self,
        stock: StockStage3,
        driver: PartitionDriver,
        norm_of: Callable[[Tensor], Any],
        norms_of_groups: Callable[[], Sequence[Any]],
    ) -> None:
        """Takes ``norm_of``, for one gradient partition, and ``norms_of_groups``, for all ranks, from its results."""
        self._stock = stock
        self._driver = driver
        self._norm_of = norm_of
        self._norms_of_groups = norms_of_groups

    def norm(self, window: Window, total: float) -> Tensor:
        stock = self._stock
        if stock.dtype == torch.float16:
            stock.inf_or_nan_tracker.fill_(not math.isfinite(window.sum_of_squares))
            stock.check_overflow()
            if stock.overflow:
                return torch.tensor(math.inf, device="cpu")
        for param in trained(stock):
            partition = self._driver.partitions[param.ds_id]
            if partition.arrivals and partition.shard.numel:
                stock.norm_for_param_grads[stock.get_param_id(param)] = self._norm_of(partition.gradient)
        norms = torch.stack([_as_tensor(norm) for norm in self._norms_of_groups()])
        if bool((~torch.isfinite(norms) | (norms < 0)).any()):
            return torch.tensor(math.inf, device="cpu")
        combined: Tensor = torch.linalg.vector_norm(norms)
        return combined

    def scale(self, before: float) -> float:
        return float(self._stock.loss_scale)


def _as_tensor(norm: Any) -> Tensor:
    """Makes a tensor of a norm, which may be a number, or a tensor on the accelerator."""
    return norm.to(torch.float32) if isinstance(norm, Tensor) else torch.tensor(norm, dtype=torch.float32, device="cpu")
