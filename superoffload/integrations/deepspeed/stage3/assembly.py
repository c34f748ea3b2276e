"""Puts ``SpeculativeStage3`` together: each part gets the parts that it needs, and none knows the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from deepspeed import comm as dist
from torch import Tensor

from superoffload.engine.bucket import Shard
from superoffload.engine.moments import noise_stream
from superoffload.engine.options import EngineOptions
from superoffload.errors import ArgumentError, StateError
from superoffload.integrations.deepspeed.config import OPTIONS_KEY, Options
from superoffload.integrations.deepspeed.driver import (
    Partition,
    PartitionDriver,
    accelerator_link,
    check_resident,
    resident_sub_groups,
)
from superoffload.integrations.deepspeed.partitions import Readers, cpus_of_this_rank, open_session
from superoffload.integrations.deepspeed.stage3.gradients import Failures, Gradients, Ranks, agreement, copies_of
from superoffload.integrations.deepspeed.stage3.inner_optimizer import InnerOptimizer, Place, SubGroupState
from superoffload.integrations.deepspeed.stage3.saved_state import SavedState
from superoffload.integrations.deepspeed.stage3.steps import Formulas, OurFormulas, Steps, StockFormulas, WindowEnd
from superoffload.integrations.deepspeed.stage3.stock import StockStage3, trained
from superoffload.links.base import Link
from superoffload.optimizer.arguments import check_rank_check, check_state_dtype

# ---- shards from DeepSpeed's flat buffers, and the state that they point into ---------------------------------------


def numel_here(param: Any, group: Any) -> int:
    """Counts the elements of ``param`` on this rank of ``group``, without the padding of the last partition."""
    size = int(param.partition_numel())
    first = size * int(dist.get_rank(group=group))
    return max(0, min(size, int(param.ds_numel) - first))


def link_of_resident(stock: StockStage3, resident: frozenset[int]) -> Link | None:
    """Makes the link that steps ``resident`` sub-groups on the accelerator; None if there are none."""
    if not resident:
        return None
    masters = {sub_group: stock.fp32_partitioned_groups_flat[sub_group] for sub_group in resident}
    check_resident(masters, {i: stock.fp16_partitioned_groups_flat[i] for i in resident})
    return accelerator_link(masters[min(resident)].device)


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


# ---- the parts ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Given:
    """Holds what DeepSpeed's optimizer gives to its parts."""

    stock: StockStage3
    options: Options
    boundary_is_told: bool
    norm_of: Callable[[Tensor], Any]  # DeepSpeed's, of one gradient partition
    norms_of_groups: Callable[[], Sequence[Any]]  # DeepSpeed's, over all ranks, from what ``norm_of`` returned
    before_gather: Callable[[list[Any]], None]
    after_update: Callable[[list[Any]], None]


@dataclass(frozen=True)
class Parts:
    """Holds what ``SpeculativeStage3`` owns. Each part knows those before it."""

    driver: PartitionDriver
    inner: InnerOptimizer
    ranks: Ranks
    failures: Failures
    gradients: Gradients
    formulas: Formulas
    window_end: WindowEnd
    steps: Steps
    saved_state: SavedState
    readers: Readers

    def abandon(self) -> None:
        """Abandons the window if there was no ``step()`` since backward."""
        self.gradients.abandon()

    def deliver(self, params: Sequence[Any]) -> None:
        """Delivers parameters before they are gathered."""
        with self.failures.kept():
            self.driver.deliver([param.ds_id for param in params])

    def take_over(self, params: Sequence[Any]) -> None:
        """Makes the masters follow parameters that ``GatheredParameters(..., modifier_rank=...)`` wrote."""
        self.ranks.forget_look()
        for param in params:
            self.driver.take_over(param.ds_id)

    def close(self) -> None:
        """Undoes what was speculated, delivers what was not delivered, ends the worker threads."""
        self.driver.close()

    def end_threads(self) -> None:
        """Ends the worker threads and leaves speculated state as it is."""
        self.driver.engine.pool.close()

    def unwrap_readers(self) -> None:
        """Restores the parameters' own gathering functions."""
        self.readers.close()


class Closed:
    """Replaces the parts of an optimizer that was destroyed, or never finished."""

    def abandon(self) -> None: ...

    def deliver(self, params: Sequence[Any]) -> None: ...

    def take_over(self, params: Sequence[Any]) -> None: ...

    def close(self) -> None: ...

    def end_threads(self) -> None: ...

    def unwrap_readers(self) -> None: ...

    def __getattr__(self, name: str) -> NoReturn:
        raise StateError("this optimizer was destroyed; make a new engine with deepspeed.initialize()")


def assemble(given: Given, module_parameters: Sequence[Any]) -> Parts:
    """Makes the parts for DeepSpeed's layout. Collective."""
    stock, options = given.stock, given.options
    resident = resident_sub_groups(stock.subgroup_to_device)
    accelerator = link_of_resident(stock, resident)
    shards = Shards(stock, options, resident)
    inner = InnerOptimizer(stock, shards.states)
    published, group = stock.fp16_partitioned_groups_flat, stock.dp_process_group
    cpus, crowded = cpus_of_this_rank(options.threads, published, group, options.rank_timeout)
    driver = PartitionDriver(
        shards.partitions,
        len(stock.fp16_groups),
        EngineOptions(options.speculation, options.bucket_numel, cpus),
        inner.hyper,
        pin=any(flat.device.type != "cpu" for flat in published),
        accelerator=accelerator,
    )
    check = check_rank_check(options.rank_check)
    mine = [partition.shard for partition in shards.partitions]
    session = open_session(
        list(trained(stock)), mine, [shard.name for shard in mine], check, group, options.rank_timeout
    )
    ranks, failures = agreement(session, driver, inner.settings), Failures()
    gradients = Gradients(
        stock, driver, copies_of(stock, driver), ranks, failures, boundary_is_told=given.boundary_is_told
    )
    formulas = (
        StockFormulas(stock, driver, given.norm_of, given.norms_of_groups) if options.match_stock else OurFormulas()
    )
    window_end = WindowEnd(stock, driver, ranks, failures, formulas)
    on_demand = options.delivery == "on_demand"
    steps = Steps(stock, driver, inner, ranks, failures, on_demand=on_demand, crowded=crowded)
    saved_state = SavedState(driver, inner, shards.states, ranks, gradients)
    readers = Readers(
        module_parameters,
        before_gather=given.before_gather if on_demand else None,
        after_update=given.after_update,
    )
    return Parts(driver, inner, ranks, failures, gradients, formulas, window_end, steps, saved_state, readers)
