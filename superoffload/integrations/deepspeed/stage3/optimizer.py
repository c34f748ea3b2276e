"""``SpeculativeStage3`` forwards DeepSpeed's calls to its parts, which are put together here; none knows the whole."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.zero.stage3 import OPTIMIZER_STEP_TIMER, DeepSpeedZeroOptimizer_Stage3
from torch import Tensor

from superoffload.engine.bucket import Shard
from superoffload.engine.moments import noise_stream
from superoffload.engine.options import EngineOptions
from superoffload.errors import ArgumentError, StateError
from superoffload.host.environment import check_environment
from superoffload.host.signals import held_signals
from superoffload.integrations.deepspeed.config import (
    OPTIONS_KEY,
    Options,
    check_arguments,
    check_groups_alike,
    check_optimizer,
    load,
    read_options,
)
from superoffload.integrations.deepspeed.driver import (
    Partition,
    PartitionDriver,
    accelerator_link,
    check_resident,
    resident_sub_groups,
)
from superoffload.integrations.deepspeed.partitions import Readers, cpus_of_this_rank, gather_together, open_session
from superoffload.integrations.deepspeed.stage3.gradients import Failures, Gradients, Ranks, agreement, copies_of
from superoffload.integrations.deepspeed.stage3.inner_optimizer import InnerOptimizer, Place, SavedState, SubGroupState
from superoffload.integrations.deepspeed.stage3.steps import Formulas, OurFormulas, Steps, StockFormulas, WindowEnd
from superoffload.integrations.deepspeed.stage3.stock import StockStage3, trained
from superoffload.links.base import Link
from superoffload.optimizer.arguments import check_rank_check, check_state_dtype
from superoffload.optimizer.lifetime import Lifetime

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
class Stage3Parts:
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


def assemble(given: Given, module_parameters: Sequence[Any]) -> Stage3Parts:
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
    gradients = Gradients(stock, driver, copies_of(stock, driver), ranks, failures, given.boundary_is_told)
    formulas = (
        StockFormulas(stock, driver, given.norm_of, given.norms_of_groups) if options.match_stock else OurFormulas()
    )
    window_end = WindowEnd(stock, driver, ranks, failures, formulas)
    on_demand = options.delivery == "on_demand"
    steps = Steps(stock, driver, inner, ranks, failures, on_demand and not crowded)
    saved_state = SavedState(driver, inner, shards.states, ranks, gradients)
    readers = Readers(
        module_parameters,
        before_gather=given.before_gather if on_demand else None,
        after_update=given.after_update,
    )
    return Stage3Parts(driver, inner, ranks, failures, gradients, formulas, window_end, steps, saved_state, readers)


# ---- what DeepSpeed calls ------------------------------------------------------------------------------------------


class SpeculativeStage3(DeepSpeedZeroOptimizer_Stage3):
    """Makes ZeRO-3's optimizer step during backward, on the CPU, with a result that speculation never changes."""

    superoffload_options: Options
    parts: Stage3Parts | Closed = Closed()  # also while DeepSpeed's constructor runs
    overflow: bool  # DeepSpeed's, as are the others
    persistent_parameters: Any
    _global_grad_norm: Any

    def __init__(
        self, module: Any, init_optimizer: Any, param_names: Any, timers: Any, ds_config: Any, **kwargs: Any
    ) -> None:
        self._lifetime = Lifetime(self)
        check_environment()
        config = load(ds_config) or {}
        self.superoffload_options = read_options(config)
        check_optimizer(init_optimizer, DeepSpeedCPUAdam)
        check_arguments(kwargs)
        super().__init__(module, init_optimizer, param_names, timers, ds_config, **kwargs)
        if self.torch_autocast_gradscaler is not None:
            raise StateError("torch_autocast with fp16: its loss scaler is not supported; use bf16, or fp16 without it")
        check_groups_alike(trained(self), self.dp_process_group)
        told = bool(config.get("managed_gradient_accumulation", True))
        self.parts = assemble(self._given(told), list(self.module.parameters()))
        self._lifetime.open()
        for param in trained(self):
            param.superoffload_steps_it = True  # switch.py asks for it

    def _given(self, boundary_is_told: bool) -> Given:
        stock: Any = weakref.proxy(self)
        return Given(
            stock,
            self.superoffload_options,
            boundary_is_told,
            norm_of=lambda gradient: stock._constant_buffered_norm2(gradient),
            norms_of_groups=lambda: stock._get_norm_groups(),
            before_gather=lambda params: self.parts.deliver(params),
            after_update=lambda params: self.parts.take_over(params),
        )

    def initialize_optimizer_states(self) -> None:
        """Makes no fp32 gradient per sub-group: the kernel reads the accumulated one. State is made with the shards."""

    # ---- gradients ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def partition_grads(self, params_to_release: list[Any], grad_partitions: list[Tensor]) -> list[Tensor]:
        """Takes reduced gradient partitions, on DeepSpeed's reduce stream, and hands them on to speculation."""
        return self.parts.gradients.take(params_to_release, grad_partitions)

    def _finalize_offload_gradient_accumulation(self) -> None:
        """Ends an unmanaged window: the start of ``step()`` hands the remaining gradients to speculation."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Abandons the window if there was no ``step()`` since backward: nothing has changed."""
        self.parts.abandon()
        super().zero_grad(set_to_none)

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, Tensor]]:
        """Copies the gradients in fp32, by sub-group and place in it."""
        return self.parts.gradients.in_fp32()

    def _get_fp32_grad_state_partition(self, param: Any, release_swap_buffers: bool) -> tuple[Tensor, int]:
        return self.parts.gradients.for_state_api(param, only_read=release_swap_buffers)

    def update_fp32_grad_for_param_vectorized(self, update_func: Any, param_list: list[Any]) -> None:
        """Updates accumulated gradients as DeepSpeed's own method does."""
        for param in param_list:
            if param.requires_grad:
                new = update_func(self.get_fp32_grad_for_param(param), param)
                self.set_fp32_grad_for_param(new, param)

    # ---- step() ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Steps in DeepSpeed's order of events, with one verdict for all sub-groups."""
        if closure is not None:
            raise StateError("step(closure): closures are not supported, as in DeepSpeed; call engine.step()")
        self.parts.inner.refuse_hooks()
        with held_signals():
            self.parts.gradients.wait()
            self._pre_step()
            self._partition_all_parameters()
            self.timers(OPTIMIZER_STEP_TIMER).start()
            self._step_window()
            self.timers(OPTIMIZER_STEP_TIMER).stop()
            if not self.overflow:
                self._post_step({OPTIMIZER_STEP_TIMER})
            self.parts.ranks.check(later=self.parts.steps.later)

    def _step_window(self) -> None:
        parts = self.parts
        window, norm = parts.window_end.close()
        before = float(self.loss_scale)
        self.overflow = not math.isfinite(float(norm))
        if self.overflow:
            parts.steps.skip(before)
            self._update_scale(True)
            self._global_grad_norm = float("inf")
            self._overflow_clean_up(before)
            return
        self._update_scale(False)
        scale = parts.formulas.scale(before)
        self._global_grad_norm = (norm / scale).float()
        parts.steps.apply(window, norm, float(self._global_grad_norm), expected=before, scale=scale)

    def _post_step(self, timer_names: Any = ()) -> None:
        """Leaves persistent parameters to their next reader, if they are delivered later."""
        persistent = self.persistent_parameters
        if self.parts.steps.later:
            self.persistent_parameters = []
        else:
            gather_together(persistent)
        try:
            super()._post_step(timer_names)
        finally:
            self.persistent_parameters = persistent

    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """Reads a flag known from packing; DeepSpeed would read the whole gradient buffer twice more."""
        flag = self.inf_or_nan_tracker.to(get_accelerator().current_device_name()).to(torch.uint8)
        self.inf_or_nan_tracker.zero_()
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.dp_process_group)
        return bool(flag.item())

    # ---- saved state ----------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Returns once nothing runs: parameters, masters and moments are those of the last finished step."""
        self.parts.saved_state.synchronize()

    def _get_fp32_opt_state_partition(
        self, param: Any, release_swap_buffers: bool = True, optim_state_key: str | None = None
    ) -> tuple[Tensor, int]:
        return self.parts.saved_state.read(param, optim_state_key)

    def set_full_hp_param(self, value: Tensor, param: Any, optim_state_key: str | None = None) -> None:
        """Overwrites a master, or a moment, by a whole tensor of the parameter's shape."""
        if param.requires_grad:
            self.parts.saved_state.write_whole(param, optim_state_key, value)

    def set_local_hp_param(self, value: Tensor, param: Any, optim_state_key: str | None = None) -> None:
        """Overwrites this rank's partition of a master, or of a moment."""
        if param.requires_grad:
            self.parts.saved_state.write_part(param, optim_state_key, value)

    def _restore_from_bit16_weights(self) -> None:
        self.synchronize()
        with self.parts.saved_state.writing_masters():
            super()._restore_from_bit16_weights()

    def checkpoint_event_prologue(self) -> None:
        self.synchronize()
        super().checkpoint_event_prologue()

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Moves the last finished step's states; gradients are in host memory anyway."""
        self.synchronize()
        super().offload_states(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Returns DeepSpeed's layout, as after the last finished step, also between backward and ``step()``."""
        self.synchronize()
        state: dict[str, Any] = super().state_dict()
        masters = self.parts.saved_state.masters()
        return state if masters is None else {**state, FP32_FLAT_GROUPS: masters}

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Loads our states and stock ZeRO-3's, also universal ones. Abandons a window in flight."""
        self.zero_grad()
        self.synchronize()
        with self.parts.saved_state.loading():
            super().load_state_dict(*args, **kwargs)

    def state_digests(self) -> dict[str, str]:
        """Returns SHA-256 of this rank's masters, moments and published partitions, as after the last finished step."""
        return self.parts.saved_state.digests()

    def __iter__(self) -> Iterator[Any]:
        """Refuses iteration, which torch.distributed.checkpoint tries on other objects than torch.optim.Optimizer."""
        raise StateError("DeepSpeed's optimizer is no torch.optim.Optimizer; use engine.save_checkpoint()")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError("an optimizer with worker threads cannot be copied or pickled; use engine.save_checkpoint()")

    # ---- figures and the end --------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float | int]:
        """Returns totals of this rank since construction (superoffload/engine/stats.py)."""
        return self.parts.driver.engine.stats()

    def close(self) -> None:
        """Undoes what was speculated and ends the worker threads; parameters and state stay readable."""
        parts, self.parts = self.parts, Closed()
        self._lifetime.close(parts, parts.unwrap_readers)

    def destroy(self) -> None:
        """Destroys DeepSpeed's part and ours.

        DeepSpeed's hooks keep the optimizer of a destroyed engine alive, so its state and gradients are freed here:
        they are most of the host memory, pinned with ``pin_memory``. Parameters stay readable.
        """
        self.close()
        self.optimizer.state.clear()  # before DeepSpeed reads it all, which would make copies of what is shown as such
        super().destroy()
        self.fp32_partitioned_groups_flat.clear()
        self.grad_partitions_flat_buffer = None
        getattr(self, "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition", {}).clear()

    def __del__(self) -> None:
        """Ends the threads of an optimizer that was never destroyed: its speculated state has no reader any more."""
        self.parts.end_threads()
