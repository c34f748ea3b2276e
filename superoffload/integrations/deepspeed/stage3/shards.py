"""Makes shards from DeepSpeed's flat buffers, and the state that the shards point into."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed import comm as dist
from torch import Tensor

from superoffload.engine.bucket import Shard
from superoffload.integrations.deepspeed import residency
from superoffload.integrations.deepspeed.driver import Partition
from superoffload.integrations.deepspeed.stage3.inner_optimizer import InnerOptimizer
from superoffload.integrations.deepspeed.stage3.stock import StockStage3
from superoffload.links.base import Link


def numel_here(param: Any, group: Any) -> int:
    """Counts the elements of ``param`` on this rank of ``group``, without the padding of the last partition."""
    size = int(param.partition_numel())
    first = size * int(dist.get_rank(group=group))
    return max(0, min(size, int(param.ds_numel) - first))


def accelerator_link(stock: StockStage3, resident: frozenset[int]) -> Link | None:
    """Makes the link that steps ``resident`` sub-groups on the accelerator; None if there are none."""
    if not resident:
        return None
    masters = {sub_group: stock.fp32_partitioned_groups_flat[sub_group] for sub_group in resident}
    residency.check_resident(masters, {i: stock.fp16_partitioned_groups_flat[i] for i in resident})
    return residency.accelerator_link(masters[min(resident)].device)


class Shards:
    """Cuts every parameter's partition on this rank out of DeepSpeed's flat buffers, as a shard of the engine."""

    def __init__(self, stock: StockStage3, inner: InnerOptimizer, resident: frozenset[int]) -> None:
        self._stock = stock
        self._inner = inner
        self._resident = resident
        self.partitions: list[Partition] = []  # in the order of sub-groups, the same on all ranks
        start = 0  # in the flat buffer in host memory, which has room for all
        for sub_group, params in enumerate(stock.fp16_groups):
            total = sum(int(param.partition_numel()) for param in params)
            gradients = stock.grad_partitions_flat_buffer[start : start + total]
            start += total
            if sub_group in resident:
                device = stock.fp32_partitioned_groups_flat[sub_group].device
                gradients = torch.zeros_like(gradients, device=device)
            self._cut(sub_group, params, gradients)

    def _cut(self, sub_group: int, params: list[Any], gradients: Tensor) -> None:
        flat = self._stock.fp32_partitioned_groups_flat[sub_group]
        offset = 0
        for param in params:
            size, numel = int(param.partition_numel()), numel_here(param, self._stock.dp_process_group)
            padded = gradients[offset : offset + size]
            shard = self._make_shard(param, sub_group, offset, numel)
            self.partitions.append(Partition(param.ds_id, sub_group, shard, padded[:numel], padded))
            # No step writes the padding, which DeepSpeed leaves uninitialized: checkpoints would differ.
            flat.data[offset + numel : offset + size].zero_()
            offset += size

    def _make_shard(self, param: Any, sub_group: int, offset: int, numel: int) -> Shard:
        stock, elements = self._stock, slice(offset, offset + numel)
        exp_avg, exp_avg_sq = self._inner.moments(sub_group)

        def target() -> Tensor:
            """Looks the slice up each time: DeepSpeed moves these buffers when states are offloaded and reloaded."""
            return stock.fp16_partitioned_groups_flat[sub_group].data[elements]

        return Shard(
            index=len(self.partitions),
            name=str(stock.param_names.get(param, f"parameter {param.ds_id}")),
            group=stock.sub_group_to_group_id[sub_group],
            numel=numel,
            gradient_dtype=stock.gradient_accumulation_dtype,
            published_dtype=stock.fp16_partitioned_groups_flat[sub_group].dtype,
            master=stock.fp32_partitioned_groups_flat[sub_group].data[elements],
            exp_avg=exp_avg[elements],
            exp_avg_sq=exp_avg_sq[elements],
            target=target,
            resident=sub_group in self._resident,
        )
