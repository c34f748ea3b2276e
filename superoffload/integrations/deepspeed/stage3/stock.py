"""Declares what our parts ask of DeepSpeed's ZeRO-3 optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor


class StockStage3(Protocol):
    """Declares public names of DeepSpeed's ZeRO-3 optimizer. Parts look them up at each use: it replaces some of them.

    Parts have a weak proxy of it, so that an unreferenced engine does not keep itself alive.
    """

    optimizer: Any
    param_names: dict[Any, str]
    dp_process_group: Any
    dtype: torch.dtype
    gradient_accumulation_dtype: torch.dtype

    # its sub-groups and their flat buffers, which it moves when states are offloaded and reloaded
    fp16_groups: list[list[Any]]
    fp16_partitioned_groups_flat: list[Tensor]
    fp32_partitioned_groups_flat: list[Tensor]
    grad_partitions_flat_buffer: Tensor
    subgroup_to_device: dict[int, str]
    sub_group_to_group_id: dict[int, int]
    grad_position: dict[int, Any]
    norm_for_param_grads: dict[int, Any]

    # a window
    gradient_accumulation_steps: int
    is_gradient_accumulation_boundary: Any
    reduce_and_partition_stream: Any
    inf_or_nan_tracker: Tensor
    overflow: bool

    @property
    def loss_scale(self) -> Any: ...
    @property
    def clip_grad(self) -> float: ...
    def get_param_id(self, param: Any) -> int: ...
    def check_overflow(self) -> None: ...


def trained(stock: StockStage3) -> Iterator[Any]:
    """Yields all parameters of the optimizer, in the order of its sub-groups."""
    for group in stock.fp16_groups:
        yield from group
