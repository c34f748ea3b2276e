"""Norm and loss scale of a verdict: from our sums, or as stock DeepSpeed computes them (``"match_stock"``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from superoffload.integrations.deepspeed.driver import PartitionDriver, Window
from superoffload.integrations.deepspeed.stage3.host import Host, trained


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
        host: Host,
        driver: PartitionDriver,
        norm_of: Callable[[Tensor], Any],
        norms_of_groups: Callable[[], Sequence[Any]],
    ) -> None:
        """``norm_of``: of one gradient partition; ``norms_of_groups``: over all ranks, from what it returned."""
        self._host = host
        self._driver = driver
        self._norm_of = norm_of
        self._norms_of_groups = norms_of_groups

    def norm(self, window: Window, total: float) -> Tensor:
        host = self._host
        if host.dtype == torch.float16:
            host.inf_or_nan_tracker.fill_(not math.isfinite(window.sum_of_squares))
            host.check_overflow()
            if host.overflow:
                return torch.tensor(math.inf)
        for param in trained(host):
            partition = self._driver.partitions[param.ds_id]
            if partition.arrivals and partition.shard.numel:
                host.norm_for_param_grads[host.get_param_id(param)] = self._norm_of(partition.gradient)
        norms = torch.stack([torch.as_tensor(norm, dtype=torch.float32) for norm in self._norms_of_groups()])
        if bool((~torch.isfinite(norms) | (norms < 0)).any()):
            return torch.tensor(math.inf)
        combined: Tensor = torch.linalg.vector_norm(norms)
        return combined

    def scale(self, before: float) -> float:
        return float(self._host.loss_scale)
