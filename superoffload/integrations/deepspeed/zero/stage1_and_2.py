"""ZeRO-1 and ZeRO-2: every rank has all parameters and steps its part of them; a step ends when parts were exchanged.

A gradient is final once its reduction has ended: bucket by bucket during backward in stage 2, after the window's last
backward in stage 1.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.constants import SINGLE_PARTITION_OF_FP32_GROUPS
from deepspeed.runtime.utils import all_gather_dp_groups
from deepspeed.runtime.zero import stage_1_and_2 as deepspeed
from torch import Tensor

from superoffload.distributed.ownership import Box, Holding
from superoffload.distributed.rank_checks import Held
from superoffload.engine.bucket import Shard
from superoffload.host.bits import BitSums, Sums, SumsByTorch, SumsInMemory
from superoffload.host.signals import held_signals
from superoffload.integrations.deepspeed.config import is_pipeline
from superoffload.integrations.deepspeed.zero.parts import Speculative
from superoffload.integrations.deepspeed.zero.stock import Place


class Stage1And2Layout:
    """Implements ``Layout``: the parameters of a group, one after the other, are cut into one part for each rank."""

    resident: frozenset[int] = frozenset()
    keeps_norm_scale = True
    written_in_place = False  # forward reads parameters where they are
    gathered = None

    def __init__(self, stock: Any) -> None:
        """Takes a weak proxy of DeepSpeed's optimizer."""
        self._stock = stock
        in_pipeline = stock.mpu is not None and is_pipeline(stock.mpu)
        self.ranks = dist.group.WORLD if in_pipeline else stock.dp_process_group
        self._offsets: dict[int, int] = {}  # in the flat group
        for i, params in enumerate(self.groups):
            self._offsets.update(zip(map(id, params), self._cut(i), strict=True))

    @property
    def groups(self) -> Sequence[Sequence[Any]]:
        found: Sequence[Sequence[Any]] = self._stock.round_robin_bit16_groups
        return found

    @property
    def masters(self) -> Sequence[Tensor]:
        found: Sequence[Tensor] = self._stock.single_partition_of_fp32_groups
        return found

    def published(self, sub_group: int, elements: slice = slice(None)) -> Tensor:
        rank = dist.get_rank(self._ranks(sub_group))
        flat: Tensor = self._stock.parallel_partitioned_bit16_groups[sub_group][rank].data
        return flat[elements]

    def gradients(self, sub_group: int) -> Tensor:
        pin = self.published(sub_group).device.type != "cpu"
        dtype = self._stock.gradient_accumulation_dtype
        return torch.zeros(len(self.masters[sub_group]), dtype=dtype, device="cpu", pin_memory=pin)

    def places(self, sub_group: int) -> list[Place]:
        rank, part = dist.get_rank(self._ranks(sub_group)), int(self._stock.partition_size[sub_group])
        places = []
        for param in self.groups[sub_group]:
            offset = self._offsets[id(param)]
            start, numel = _part_of(param.numel(), offset, rank * part, part)
            places.append(Place(max(0, offset + start - rank * part) if numel else 0, numel, numel, start))
        return places

    def _cut(self, sub_group: int) -> Iterator[int]:
        """Yields where parameters are in the flat group; with padding between them only since DeepSpeed 0.19."""
        known = getattr(self._stock, "round_robin_bit16_offsets", None)
        if known is not None:
            yield from map(int, known[sub_group])
            return
        offset = 0
        for param in self.groups[sub_group]:
            yield offset
            offset += param.numel()

    def _ranks(self, sub_group: int) -> Any:
        """Returns the process group that shares a group's state: experts have others than the rest."""
        return self._stock.real_dp_process_group[sub_group]

    def param_group(self, sub_group: int) -> int:
        return sub_group

    def key(self, param: Any) -> int:
        return int(self._stock.get_param_id(param))

    def numel(self, param: Any) -> int:
        return int(param.numel())

    def name(self, param: Any) -> str:
        return str(self._stock.param_names.get(param, f"parameter {self.key(param)}"))

    def is_counted(self, param: Any) -> bool:
        return not getattr(param, "ds_pipe_replicated", False)

    def take_gradient(self, param: Any) -> Tensor | None:
        gradient: Tensor | None = self._stock.get_param_gradient_attribute(param)
        self._stock.clear_grad_attribute(param)
        return gradient

    def held(self, sub_group: int, param: Any, shard: Shard) -> Held:
        ranks = dist.get_process_group_ranks(self._ranks(sub_group))
        part, runs = int(self._stock.partition_size[sub_group]), {}
        for index, rank in enumerate(ranks):
            start, numel = _part_of(param.numel(), self._offsets[id(param)], index * part, part)
            runs[rank] = Box((start,), (numel,))
        name = shard.name
        if not self.is_counted(param):  # the partitions of another stage cut it elsewhere
            name = f"{name} (a copy, tied)"
        elif ranks != dist.get_process_group_ranks(self._stock.dp_process_group):  # others have other experts
            name = f"{name} (of ranks {', '.join(map(str, ranks))})"
        return Held(name, param, shard, Holding("spread", (param.numel(),), runs[dist.get_rank()], True, runs))

    def norm_of(self, gradient: Tensor) -> Any:
        return gradient.double().norm(2)

    def norms_of_groups(self) -> Sequence[Any]:
        stock = self._stock
        norms = [stock.complete_grad_norm_calculation_for_cpu_offload(params) for params in stock.params_in_partition]
        stock.norm_for_param_grads.clear()
        return norms

    def overflowed(self, here: bool) -> bool:
        self._stock.local_overflow = here
        self._stock.check_overflow()
        return bool(self._stock.overflow)


def _part_of(numel: int, offset: int, begin: int, part: int) -> tuple[int, int]:
    """Cuts what ``begin`` to ``begin + part`` has of a parameter at ``offset``: where that starts, and its length."""
    start = min(max(begin - offset, 0), numel)
    return start, max(0, min(numel, begin + part - offset) - start)


class Writes:
    """Notices what a program writes to parameters between steps, by their bits: any way of writing shows.

    In host memory each parameter's part is compared, on a device all parts of a group together.
    """

    def __init__(self, layout: Stage1And2Layout, *, on_host: bool) -> None:
        self._flats: list[tuple[list[Any], Callable[[], Tensor]]] = []
        self._bits: BitSums = SumsInMemory() if on_host else SumsByTorch()
        for i, params in enumerate(layout.groups):
            here = [(param, place) for param, place in zip(params, layout.places(i), strict=True) if place.numel]
            if on_host:
                self._flats += [([param], partial(layout.published, i, place.elements)) for param, place in here]
            else:
                self._flats.append(([param for param, _ in here], partial(layout.published, i)))
        self._set: set[int] = set()
        self.remember()

    def remember(self) -> None:
        """Takes the present values as ours."""
        self._set.clear()
        self._sums: list[Sums] = self._bits.of([flat() for _, flat in self._flats])

    def except_for(self, param: Any) -> None:
        """Keeps a master that a program has set: the next step publishes it."""
        self._set.add(id(param))

    def found(self) -> list[Any]:
        """Returns the parameters that may have been written."""
        changed = self._bits.changed(self._sums, [flat() for _, flat in self._flats])
        written = [params for (params, _), differs in zip(self._flats, changed, strict=True) if differs]
        return [param for params in written for param in params if id(param) not in self._set]


class SpeculativeStage1And2(Speculative, deepspeed.DeepSpeedZeroOptimizer):
    """Makes the optimizer of ZeRO-1 and ZeRO-2 step during backward, on the CPU, with a result that speculation never
    changes."""

    writes: Writes
    _in_epilogue = False

    def __init__(self, init_optimizer: Any, param_names: Any, timers: Any, ds_config: Any, **kwargs: Any) -> None:
        told = self.check_given(init_optimizer, ds_config, kwargs)
        self._reduced: dict[int, Tensor] = {}  # sums in the dtype of accumulation, until they are taken
        super().__init__(init_optimizer, param_names, timers, **kwargs)
        # Buffers of DeepSpeed's own way to host memory and back.
        self.param_buffer_of_bit16_for_cpu_offload_groups.clear()
        self.temp_grad_buffer_for_cpu_offload = self.temp_grad_buffer_for_gpu_offload = None
        stock: Any = weakref.proxy(self)
        layout = Stage1And2Layout(stock)
        self.begin(stock, layout, boundary_is_told=told)
        self._drop_fragments()
        self.writes = Writes(layout, on_host=layout.published(0).device.type == "cpu")

    def initialize_optimizer_states(self) -> None:
        """Makes no fp32 gradient: the kernel reads the accumulated one. State is made with the shards."""

    # ---- gradients ------------------------------------------------------------------------------------------------

    def _get_compact_grad_partition_slice(
        self, group_idx: int, partition_id: int, param_id: int, num_elements: int
    ) -> Tensor | None:
        """Returns memory for the reduced gradient where that has more bits than the parameter's dtype."""
        if not self._use_compact_grad_partition_buffer(group_idx):
            return None
        if partition_id != dist.get_rank(self.real_dp_process_group[group_idx]):
            return None
        device, dtype = get_accelerator().current_device_name(), self.gradient_accumulation_dtype
        self._reduced[param_id] = torch.zeros(int(num_elements), dtype=dtype, device=device)
        return self._reduced[param_id]

    @torch.no_grad()
    def copy_grads_in_partition(self, param: Any, group_idx: int | None = None) -> None:
        """Takes the reduced gradient of a parameter of which this rank has a part, on the stream that reduces."""
        reduced = self._reduced.pop(self.get_param_id(param), None)
        if reduced is None:
            _, start, _, numel = self.grad_position[self.get_param_id(param)]
            reduced = self.get_param_gradient_attribute(param).view(-1)[start : start + numel]
        self.parts.gradients.take([param], [reduced])

    def reduce_independent_p_g_buckets_and_remove_grads(self, param: Any, i: int) -> None:
        """Notes the gradient also where other ranks have all of the parameter's state."""
        super().reduce_independent_p_g_buckets_and_remove_grads(param, i)
        if not self.is_param_in_current_partition[self.get_param_id(param)]:
            self.parts.driver.partitions[self.get_param_id(param)].arrivals += 1

    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        """Ends stage 1's window; with ``overlap_comm`` stock forgets what only earlier micro-batches have used."""
        if self.overlap_comm:
            pending = {param_id for bucket in self.ipg_buckets.values() for _, _, param_id in bucket.params}
            for i, params in enumerate(self.bit16_groups):
                for param in params:
                    param_id = self.get_param_id(param)
                    is_reduced = self.params_already_reduced[param_id] or param_id in pending
                    if not is_reduced and self.get_gradient_for_reduction(param) is not None:
                        self.reduce_ready_partitions_and_remove_grads(param, i)
        super().reduce_gradients(pipeline_parallel)

    def _finalize_cpu_offload_gradient_accumulation(self) -> None:
        """Ends an unmanaged window: the start of ``step()`` hands the remaining gradients to speculation."""

    def independent_gradient_partition_epilogue(self) -> None:
        self._in_epilogue = True
        try:
            super().independent_gradient_partition_epilogue()
        finally:
            self._in_epilogue = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Abandons the window if there was no ``step()`` since backward: nothing has changed."""
        if not self._in_epilogue:  # where DeepSpeed 0.18 frees what was reduced
            self.parts.abandon()
        super().zero_grad(set_to_none)

    # ---- step() ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Steps in DeepSpeed's order of events, with one verdict for all groups."""
        self.check_step(closure)
        timers = [self.timers(name) for name in deepspeed.OPTIMIZER_TIMERS]
        with held_signals():
            for timer in timers:
                timer.start()
            self.micro_step_id = deepspeed.INITIAL_MICRO_STEP_ID
            self.parts.gradients.wait()
            written = self.writes.found()
            with self.parts.failures.kept():
                if written:
                    self.parts.take_over(written)
            self.step_window(self)
            if self.overflow:
                self.zero_grad()
            else:
                with self.parts.failures.kept():
                    self.parts.driver.deliver()
                self._exchange_parts()
            for timer in timers:
                timer.stop()
            self.timers.log(deepspeed.OPTIMIZER_TIMERS)
            self.parts.ranks.check(later=False)

    def _exchange_parts(self) -> None:
        """Brings the parts that other ranks have published here. Collective."""
        all_gather_dp_groups(
            groups_flat=self.bit16_groups_flat,
            partitioned_param_groups=self.parallel_partitioned_bit16_groups,
            dp_process_group=self.real_dp_process_group,
            start_alignment_factor=self.nccl_start_alignment_factor,
            allgather_bucket_size=self.allgather_bucket_size,
        )
        self.writes.remember()

    # ---- one parameter's state, for DeepSpeed's safe_get_* and safe_set_* -------------------------------------------

    def _get_offload_gradient_dict(self) -> None:
        """Makes no list of fp32 gradients."""

    def _link_all_hp_params(self) -> None:
        super()._link_all_hp_params()
        stock = weakref.proxy(self)
        for params in self.bit16_groups:
            for param in params:
                param.get_full_hp_param = partial(_read_state, stock, param)
                param.set_full_hp_param = partial(_write_state, stock, param)
                param.get_full_hp_grad = partial(_read_gradient, stock, param)
                param.set_full_hp_grad = partial(_write_gradient, stock, param)

    def _drop_fragments(self) -> None:
        """Drops views of DeepSpeed's flat state, which keep memory that split masters give up."""
        for params in self.bit16_groups:
            for param in params:
                if getattr(param, "_hp_mapping", None) is not None:
                    param._hp_mapping.hp_fragment = param._hp_mapping.optim_fragment = None

    # ---- saved state ----------------------------------------------------------------------------------------------

    def _restore_from_bit16_weights(self) -> None:
        super()._restore_from_bit16_weights()
        self.writes.remember()

    @torch.no_grad()
    def update_lp_params(self) -> None:
        """Publishes all masters, on all ranks."""
        self.synchronize()
        for partition in self.parts.driver.partitions.values():
            shard = partition.shard
            shard.target().copy_(shard.master if shard.upper is None else shard.upper.read())
        self._exchange_parts()

    def state_dict(self) -> dict[str, Any]:
        """Returns DeepSpeed's layout, as after the last finished step, also between backward and ``step()``."""
        self.synchronize()
        state: dict[str, Any] = super().state_dict()
        masters = self.parts.saved_state.masters()
        if masters is not None:
            state[SINGLE_PARTITION_OF_FP32_GROUPS] = self._get_groups_without_padding(masters)
        return state

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Loads our states and stock's, also universal ones. Abandons a window in flight."""
        self.zero_grad()
        self.synchronize()
        with self.parts.saved_state.loading():
            self._link_all_hp_params()  # universal checkpoints are read into views of the flat state
            super().load_state_dict(*args, **kwargs)
        self._drop_fragments()
        self._exchange_parts()

    # ---- the end --------------------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Destroys DeepSpeed's part and ours. Its hooks keep the optimizer alive, so the state is freed here."""
        self.close()
        self.optimizer.state.clear()
        super().destroy()
        self.single_partition_of_fp32_groups.clear()
        for group in self.optimizer.param_groups:
            group["params"] = []


def _read_state(stock: Any, param: Any, optim_state_key: str | None = None) -> Tensor:
    """Returns the whole fp32 master of a parameter, or a moment, on every rank. Collective."""
    return _whole(stock, param, lambda: stock.parts.saved_state.read(param, optim_state_key)[0])


def _read_gradient(stock: Any, param: Any) -> Tensor:
    """Returns the whole gradient of this window in fp32, on every rank. Collective."""
    return _whole(stock, param, lambda: stock.parts.gradients.partition_of(param, write=False))


def _whole(stock: Any, param: Any, read: Callable[[], Tensor]) -> Tensor:
    layout = stock.parts.layout
    partition = stock.parts.driver.partitions[layout.key(param)]
    start = partition.shard.offset
    whole = torch.zeros(param.numel(), dtype=torch.float32, device=param.device)
    whole[start : start + partition.shard.numel].copy_(read())
    dist.all_reduce(whole, group=stock.real_dp_process_group[partition.sub_group])
    return whole.view(param.shape)


def _write_state(stock: Any, param: Any, value: Tensor, optim_state_key: str | None = None) -> None:
    """Overwrites this rank's part of a master, or of a moment."""
    stock.parts.saved_state.write_whole(param, optim_state_key, value)
    if optim_state_key is None:
        stock.writes.except_for(param)


def _write_gradient(stock: Any, param: Any, value: Tensor) -> None:
    """Overwrites this rank's part of the gradient of this window."""
    part = stock.parts.gradients.partition_of(param, write=True)
    shard = stock.parts.driver.partitions[stock.parts.layout.key(param)].shard
    part.copy_(value.flatten()[shard.offset : shard.offset + shard.numel])
