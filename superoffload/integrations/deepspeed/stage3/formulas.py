"""Norm and loss scale of a verdict: from our sums, or as stock DeepSpeed computes them (``"match_stock"``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from superoffload.integrations.deepspeed.driver import PartitionDriver, Window
from superoffload.integrations.deepspeed.stage3.stock import StockStage3, trained


class Formulas(Protocol):
    """Says by which norm a window is judged and by which loss scale its gradients are divided."""

    def norm(self, window: Window, total: float) -> Tensor:
        """Of the scaled gradients over all ranks; infinite where the step is skipped. ``total``: its square."""

    def scale(self, before: float) -> float:
        """``before``: the loss scale of the window. Asked once DeepSpeed has chosen the next one."""


class OurFormulas:
    """The norm is that of fp64 sums, the scale that of the window."""

    def norm(self, window: Window, total: float) -> Tensor:
        return torch.tensor(math.sqrt(total), dtype=torch.float64)

    def scale(self, before: float) -> float:
        return before


class StockFormulas:
    """The norm is DeepSpeed's: per parameter, per sub-group, in fp32. It unscales with the scale of the next step."""

    def __init__(
        self,
        stock: StockStage3,
        driver: PartitionDriver,
        norm_of: Callable[[Tensor], Any],
        norms_of_groups: Callable[[], Sequence[Any]],
    ) -> None:
        """``norm_of``: of one gradient partition; ``norms_of_groups``: over all ranks, from what it returned."""
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
                return torch.tensor(math.inf)
        for param in trained(stock):
            partition = self._driver.partitions[param.ds_id]
            if partition.arrivals and partition.shard.numel:
                stock.norm_for_param_grads[stock.get_param_id(param)] = self._norm_of(partition.gradient)
        norms = torch.stack([torch.as_tensor(norm, dtype=torch.float32) for norm in self._norms_of_groups()])
        if bool((~torch.isfinite(norms) | (norms < 0)).any()):
            return torch.tensor(math.inf)
        combined: Tensor = torch.linalg.vector_norm(norms)
        return combined

    def scale(self, before: float) -> float:
        return float(self._stock.loss_scale)
