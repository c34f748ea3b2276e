"""Gradients: reduced, into the flat buffer, on to speculation; and who reads or writes them there."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from superoffload.integrations.deepspeed.driver import Partition
from superoffload.integrations.deepspeed.stage3.agreement import Agreement
from superoffload.interrupts import held_signals


class Gradients(Agreement):
    """Follows a window's gradients."""

    _on_cpu: bool  # copies have ended when they return
    _boundary_is_told: bool  # DeepSpeed knows which backward is the window's last
    _arriving: deque[tuple[Any, list[tuple[Partition, int]]]]  # copies on the way: their event, and what they bring

    @torch.no_grad()
    def partition_grads(self, params_to_release: list[Any], grad_partitions: list[Tensor]) -> list[Tensor]:
        """Reduced gradient partitions, on DeepSpeed's reduce stream: into the flat buffer, and on to speculation."""
        driver = self._opened()
        taken = []
        with held_signals():
            with self._for_the_next_step():
                self._look()
            for param, incoming in zip(params_to_release, grad_partitions, strict=True):
                with self._for_the_next_step():
                    driver.let_go(driver.partitions[param.ds_id])
                taken.append(driver.take(param.ds_id, incoming))
                if not self._on_cpu and param.grad is not None:
                    param.grad.record_stream(get_accelerator().current_stream())
                param.grad = None
            self._pass_on([partition for partition in taken if self._is_last(partition)])
        return [partition.gradient for partition in taken]

    def _is_last(self, partition: Partition) -> bool:
        """Whether this gradient is most likely the window's last. If not, the next one undoes what was done with it."""
        told = self.is_gradient_accumulation_boundary
        if callable(told):  # a method since 0.19
            told = told()
        if self._boundary_is_told and (self.gradient_accumulation_steps > 1 or not told):
            return bool(told)
        return partition.arrivals >= partition.expected  # as many as last time

    def _pass_on(self, partitions: list[Partition]) -> None:
        arrivals = [(partition, partition.arrivals) for partition in partitions]
        if self._on_cpu:
            self._hand_over(arrivals)
            return
        event = get_accelerator().Event()
        event.record(get_accelerator().current_stream())
        self._arriving.append((event, arrivals))
        while self._arriving and self._arriving[0][0].query():
            self._hand_over(self._arriving.popleft()[1])

    def _await_gradients(self) -> None:
        """Everything that was reduced is in host memory."""
        if not self._on_cpu:
            self.reduce_and_partition_stream.synchronize()
        while self._arriving:
            self._hand_over(self._arriving.popleft()[1])

    def _hand_over(self, arrivals: list[tuple[Partition, int]]) -> None:
        """Not where another gradient has come since: its copy may still run."""
        driver = self._opened()
        for partition, arrival in arrivals:
            if partition.arrivals == arrival:
                driver.final(partition, unscale=1.0 / self.loss_scale, max_grad_norm=self.clip_grad or None)

    def _finalize_offload_gradient_accumulation(self) -> None:
        """The end of an unmanaged window: what has not gone to speculation yet goes at the start of ``step()``."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Without a ``step()`` since backward, the window is abandoned: nothing has changed."""
        if self._driver is not None:
            with held_signals():
                self._arriving.clear()
                self._driver.abandon()
        super().zero_grad(set_to_none)

    # ---- who reads and writes accumulated gradients ---------------------------------------------------------------

    def _gradient_slice(self, param: Any, *, write: bool) -> Tensor:
        """The accumulated gradient's partition, padding included, as DeepSpeed's readers expect it."""
        self._await_gradients()
        partition = self._opened().partitions[param.ds_id]
        if write:
            self._opened().let_go(partition)
            partition.arrivals = max(1, partition.arrivals)
            partition.written = True
        return partition.padded

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, Tensor]]:
        """Copies in fp32, by sub-group and place in it."""
        return {
            sub_group: {i: self._gradient_slice(param, write=False).float() for i, param in enumerate(params)}
            for sub_group, params in enumerate(self.fp16_groups)
        }

    def _get_fp32_grad_state_partition(self, param: Any, release_swap_buffers: bool) -> tuple[Tensor, int]:
        sub_group = self.grad_position[self.get_param_id(param)][0]
        if release_swap_buffers:  # only to be read
            return self._gradient_slice(param, write=False).float().clone(), sub_group
        return self._gradient_slice(param, write=True), sub_group

    def update_fp32_grad_for_param_vectorized(self, update_func: Any, param_list: list[Any]) -> None:
        """As DeepSpeed's, on the accumulated gradient."""
        for param in param_list:
            if param.requires_grad:
                new = update_func(self.get_fp32_grad_for_param(param), param)
                self.set_fp32_grad_for_param(new, param)
