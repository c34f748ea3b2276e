"""ZeRO-3: parameters are partitioned too, so a step ends at this rank's partitions, and readers gather them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS
from deepspeed.runtime.zero.partition_parameters import get_allgather_dtype
from deepspeed.runtime.zero.stage3 import OPTIMIZER_STEP_TIMER, DeepSpeedZeroOptimizer_Stage3
from torch import Tensor

from superoffload.distributed.ownership import flat_holding
from superoffload.distributed.rank_checks import Held
from superoffload.distributed.session import Gathered
from superoffload.engine.bucket import Shard
from superoffload.host.signals import held_signals
from superoffload.integrations.deepspeed.config import check_groups_alike
from superoffload.integrations.deepspeed.driver import resident_sub_groups
from superoffload.integrations.deepspeed.partitions import Readers, gather_together, whole_parameter
from superoffload.integrations.deepspeed.zero.parts import Speculative
from superoffload.integrations.deepspeed.zero.stock import Place, trained


def numel_here(param: Any, group: Any) -> int:
    """Counts the elements of ``param`` on this rank of ``group``, without the padding of the last partition."""
    size = int(param.partition_numel())
    first = size * int(dist.get_rank(group=group))
    return max(0, min(size, int(param.ds_numel) - first))


class Stage3Layout:
    """Implements ``Layout``: every parameter is cut into equal parts, the last ones shorter or empty."""

    keeps_norm_scale = False

    def __init__(self, stock: Any) -> None:
        """Takes a weak proxy of DeepSpeed's optimizer."""
        self._stock = stock
        self.ranks = stock.dp_process_group
        self.resident = resident_sub_groups(stock.subgroup_to_device)
        # A rank alone, on processors, computes with the partitions themselves.
        self.written_in_place = bool(stock.offload_param) and not (
            dist.get_world_size(self.ranks) == 1 and get_accelerator().device_name() == "cpu"
        )
        self._wholes: list[tuple[Any, Tensor]] = []  # parameters, with what stands for them in the rank checks

    @property
    def groups(self) -> Sequence[Sequence[Any]]:
        found: Sequence[Sequence[Any]] = self._stock.fp16_groups
        return found

    @property
    def masters(self) -> Sequence[Tensor]:
        found: Sequence[Tensor] = self._stock.fp32_partitioned_groups_flat
        return found

    def published(self, sub_group: int) -> Tensor:
        flat: Tensor = self._stock.fp16_partitioned_groups_flat[sub_group].data
        return flat

    def gradients(self, sub_group: int) -> Tensor:
        """Returns a part of DeepSpeed's buffer in host memory, which has room for all, or memory on the accelerator."""
        sizes = [sum(int(param.partition_numel()) for param in params) for params in self.groups]
        start = sum(sizes[:sub_group])
        found: Tensor = self._stock.grad_partitions_flat_buffer[start : start + sizes[sub_group]]
        return torch.zeros_like(found, device=self.masters[sub_group].device) if sub_group in self.resident else found

    def places(self, sub_group: int) -> list[Place]:
        group = self._stock.dp_process_group
        places, offset, rank = [], 0, int(dist.get_rank(group=group))
        for param in self.groups[sub_group]:
            size = int(param.partition_numel())
            places.append(Place(offset, size, numel_here(param, group), size * rank))
            offset += size
        return places

    def param_group(self, sub_group: int) -> int:
        return int(self._stock.sub_group_to_group_id[sub_group])

    def key(self, param: Any) -> int:
        return int(param.ds_id)

    def numel(self, param: Any) -> int:
        return int(param.ds_numel)

    def name(self, param: Any) -> str:
        return str(self._stock.param_names.get(param, f"parameter {param.ds_id}"))

    def is_counted(self, param: Any) -> bool:
        return True

    def take_gradient(self, param: Any) -> Tensor | None:
        gradient: Tensor | None
        gradient, param.grad = param.grad, None
        return gradient

    def held(self, sub_group: int, param: Any, shard: Shard) -> Held:
        owners = dist.get_process_group_ranks(self._stock.dp_process_group)
        holding = flat_holding(
            "ZeRO-3", owners, int(dist.get_rank()), int(param.ds_numel), int(param.partition_numel())
        )
        # A parameter has no elements while it is partitioned.
        whole = torch.empty(param.ds_shape, dtype=param.dtype, device="meta")
        self._wholes.append((param, whole))
        return Held(shard.name, whole, shard, holding)

    @property
    def gathered(self) -> Gathered:
        wholes = self._wholes

        def gathered() -> Iterator[tuple[Tensor, Tensor]]:
            for param, whole in wholes:
                with whole_parameter(param) as full:
                    # torch_autocast gathers in its dtype and casts back; in that dtype all ranks have the same values.
                    yield whole, full.to(get_allgather_dtype(param, param.ds_tensor))

        return gathered

    def norm_of(self, gradient: Tensor) -> Any:
        return self._stock._constant_buffered_norm2(gradient)

    def norms_of_groups(self) -> Sequence[Any]:
        found: Sequence[Any] = self._stock._get_norm_groups()
        return found

    def overflowed(self, here: bool) -> bool:
        self._stock.inf_or_nan_tracker.fill_(here)
        self._stock.check_overflow()
        return bool(self._stock.overflow)


class SpeculativeStage3(Speculative, DeepSpeedZeroOptimizer_Stage3):
    """Makes ZeRO-3's optimizer step during backward, on the CPU, with a result that speculation never changes."""

    persistent_parameters: Any  # DeepSpeed's
    _readers: Readers | None = None

    def __init__(
        self, module: Any, init_optimizer: Any, param_names: Any, timers: Any, ds_config: Any, **kwargs: Any
    ) -> None:
        told = self.check_given(init_optimizer, ds_config, kwargs)
        super().__init__(module, init_optimizer, param_names, timers, ds_config, **kwargs)
        stock: Any = weakref.proxy(self)
        layout = Stage3Layout(stock)
        check_groups_alike(trained(layout), self.dp_process_group)
        self.begin(stock, layout, boundary_is_told=told)
        late = self.parts.on_demand or layout.written_in_place
        self._readers = Readers(
            self.module.parameters(),
            before_use=(lambda params: self.parts.deliver(params)) if late else None,
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
        self.check_step(closure)
        with held_signals():
            self.parts.gradients.wait()
            self._pre_step()
            self._partition_all_parameters()
            self.timers(OPTIMIZER_STEP_TIMER).start()
            scale = self.step_window(self)
            if self.overflow:
                self._overflow_clean_up(scale)
            self.timers(OPTIMIZER_STEP_TIMER).stop()
            if not self.overflow:
                self._post_step({OPTIMIZER_STEP_TIMER})
            self.parts.ranks.check(later=self.parts.steps.later)

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

    def checkpoint_event_prologue(self) -> None:
        self.synchronize()
        super().checkpoint_event_prologue()

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

    # ---- the end --------------------------------------------------------------------------------------------------

    def unwrap(self) -> None:
        if self._readers is not None:
            self._readers.close()

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
