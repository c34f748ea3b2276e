"""``SpeculativeStage3`` forwards DeepSpeed's calls to its parts."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.zero.stage3 import OPTIMIZER_STEP_TIMER, DeepSpeedZeroOptimizer_Stage3
from torch import Tensor

from superoffload.errors import StateError
from superoffload.host.environment import check_environment
from superoffload.host.signals import held_signals
from superoffload.integrations.deepspeed.config import (
    Options,
    check_arguments,
    check_groups_alike,
    check_optimizer,
    load,
    read_options,
)
from superoffload.integrations.deepspeed.partitions import gather_together
from superoffload.integrations.deepspeed.stage3.assembly import Closed, Given, Parts, assemble
from superoffload.integrations.deepspeed.stage3.stock import trained
from superoffload.optimizer.lifetime import Lifetime


class SpeculativeStage3(DeepSpeedZeroOptimizer_Stage3):
    """Makes ZeRO-3's optimizer step during backward, on the CPU, with a result that speculation never changes."""

    superoffload_options: Options
    parts: Parts | Closed = Closed()  # also while DeepSpeed's constructor runs
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
            param.superoffload_steps_it = True  # clipping.py asks for it

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
