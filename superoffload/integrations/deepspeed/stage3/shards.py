"""Makes shards from DeepSpeed's flat buffers, and the state that the shards point into."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from deepspeed import comm as dist
from torch import Tensor

from superoffload.engine.bucket import Shard
from superoffload.engine.moments import noise_stream
from superoffload.errors import ArgumentError
from superoffload.integrations.deepspeed import residency
from superoffload.integrations.deepspeed.config import OPTIONS_KEY, Options
from superoffload.integrations.deepspeed.driver import Partition
from superoffload.integrations.deepspeed.stage3.stock import StockStage3
from superoffload.integrations.deepspeed.stage3.sub_group_state import Place, SubGroupState
from superoffload.links.base import Link
from superoffload.optimizer.arguments import check_state_dtype


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
    """Makes a shard of the engine, and its state, for every parameter's partition on this rank."""

    def __init__(self, stock: StockStage3, options: Options, resident: frozenset[int]) -> None:
        self._stock = stock
        self._options = options
        self._resident = resident
        self.partitions: list[Partition] = []  # in the order of sub-groups, the same on all ranks
        self.states: list[SubGroupState] = []  # one per sub-group
        self._check_split_masters()
        start = 0  # in the flat buffer in host memory, which has room for all
        for sub_group, params in enumerate(stock.fp16_groups):
            total = sum(int(param.partition_numel()) for param in params)
            gradients = stock.grad_partitions_flat_buffer[start : start + total]
            start += total
            if sub_group in resident:
                device = stock.fp32_partitioned_groups_flat[sub_group].device
                gradients = torch.zeros_like(gradients, device=device)
            self._cut(sub_group, params, gradients)

    def _check_split_masters(self) -> None:
        """Refuses split masters where no parameter has them."""
        dtypes = {flat.dtype for flat in self._stock.fp16_partitioned_groups_flat}
        if self._options.master_dtype == "split" and torch.bfloat16 not in dtypes:
            raise ArgumentError(
                f"\"{OPTIONS_KEY}\": master_dtype='split': it needs bfloat16 parameters, and these are "
                f'{", ".join(sorted(map(str, dtypes)))}; set "bf16": {{"enabled": true}}, or "fp32"'
            )

    def _cut(self, sub_group: int, params: list[Any], gradients: Tensor) -> None:
        places = list(self._places(params))
        state = self._make_state(sub_group, places)
        self.states.append(state)
        for member, (param, place) in enumerate(zip(params, places, strict=True)):
            shard = self._make_shard(param, sub_group, place, member)
            state.add(shard)
            padded = gradients[place.offset : place.offset + place.size]
            self.partitions.append(Partition(param.ds_id, sub_group, shard, padded[: place.numel], padded))

    def _places(self, params: list[Any]) -> Iterator[Place]:
        offset = 0
        for param in params:
            size = int(param.partition_numel())
            yield Place(offset, size, numel_here(param, self._stock.dp_process_group))
            offset += size

    def _make_state(self, sub_group: int, places: list[Place]) -> SubGroupState:
        stock = self._stock
        flat = stock.fp32_partitioned_groups_flat[sub_group]
        is_bf16 = stock.fp16_partitioned_groups_flat[sub_group].dtype == torch.bfloat16
        return SubGroupState(
            flat,
            places,
            moments=check_state_dtype(self._options.state_dtype),
            split=is_bf16 and self._options.master_dtype == "split",
            device=flat.device if sub_group in self._resident else None,
        )

    def _make_shard(self, param: Any, sub_group: int, place: Place, member: int) -> Shard:
        stock, state, elements = self._stock, self.states[sub_group], place.elements

        def target() -> Tensor:
            """Looks the slice up each time: DeepSpeed moves these buffers when states are offloaded and reloaded."""
            return stock.fp16_partitioned_groups_flat[sub_group].data[elements]

        index = len(self.partitions)
        name = str(stock.param_names.get(param, f"parameter {param.ds_id}"))
        shard = Shard(
            index=index,
            name=name,
            group=stock.sub_group_to_group_id[sub_group],
            numel=place.numel,
            gradient_dtype=stock.gradient_accumulation_dtype,
            published_dtype=stock.fp16_partitioned_groups_flat[sub_group].dtype,
            master=state.masters[member],
            exp_avg=state.moments["exp_avg"][member],
            exp_avg_sq=state.moments["exp_avg_sq"][member],
            target=target,
            noise_stream=noise_stream(self._options.seed, name),
            offset=place.size * int(dist.get_rank(group=stock.dp_process_group)),
            resident=sub_group in self._resident,
        )
        if state.split:
            shard.splits_master()
        return shard
