"""The end of a window: the norm over all ranks, overflow and clip, by DeepSpeed's formulas."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from superoffload.errors import ArgumentError, RankError, WorkerError
from superoffload.integrations.deepspeed.driver import Window
from superoffload.integrations.deepspeed.stage3.gradients import Gradients
from superoffload.ranks.session import RankSession


def _exchanged(session: RankSession, window: Window) -> Sequence[float]:
    session.start(window.sums)
    return session.finish() or []


def _fold(sums: Sequence[float]) -> float:
    """Of all ranks, in their order, so that it has the same bits on all of them."""
    total = sum(sums)
    return total if math.isfinite(total) else math.inf


class Verdicts(Gradients):
    """What a step is decided by."""

    _weights_are_checked = False

    def _close_window(self) -> tuple[Window, Tensor]:
        """This rank's window, and the norm of the scaled gradients over all ranks, from fp64 sums."""
        driver, session = self._opened(), self._session
        frozen = {param.ds_id for param in self._trained() if not param.requires_grad}
        if session is not None:
            session.begin()
            session.agree_on(self._settings(), found_inf=False)
        window = Window({})
        with self._for_the_next_step():
            self._look()
            window = driver.close_window(lambda key: key not in frozen)
        failure, self._failure = self._failure, None
        try:
            if failure is not None:
                raise WorkerError(f"{failure}; no rank stepped")
            self._check_weights()
            total = _fold(list(window.sums.values()) if session is None else _exchanged(session, window))
        except (ArgumentError, WorkerError, RankError):
            if session is not None:
                session.fail()
            driver.abandon()
            raise
        return window, torch.tensor(math.sqrt(total), dtype=torch.float64)

    def _check_weights(self) -> None:
        """In the first step, so that a checkpoint can be loaded over what memory held before. Published values, since
        masters may have been stepped with a gradient that is not finite."""
        if self._weights_are_checked:
            return
        for partition in self._opened().partitions.values():
            shard = partition.shard
            bad = shard.numel - int(torch.isfinite(shard.target()).sum())
            if bad:
                raise ArgumentError(
                    f"{shard.name}: {bad} of the {shard.numel} values that this rank has are NaN or infinite before "
                    "the first step; initialize it first. No rank stepped"
                )
        self._weights_are_checked = True

    def _stock_norm(self, window: Window) -> Tensor:
        """DeepSpeed's own: per parameter, per sub-group, in fp32; infinite where it would skip the step."""
        driver = self._opened()
        if self.dtype == torch.float16:
            self.inf_or_nan_tracker.fill_(not math.isfinite(window.sum_of_squares))
            self._check_overflow()
            if self.overflow:
                return torch.tensor(math.inf)
        for param in self._trained():
            partition = driver.partitions[param.ds_id]
            if partition.arrivals and partition.shard.numel:
                self.norm_for_param_grads[self.get_param_id(param)] = self._constant_buffered_norm2(partition.gradient)
        norms = torch.stack([torch.as_tensor(norm, dtype=torch.float32) for norm in self._get_norm_groups()])
        if bool((~torch.isfinite(norms) | (norms < 0)).any()):
            return torch.tensor(math.inf)
        combined: Tensor = torch.linalg.vector_norm(norms)
        return combined

    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """Known from packing; DeepSpeed would read the whole gradient buffer twice more."""
        flag = self.inf_or_nan_tracker.to(get_accelerator().current_device_name()).to(torch.uint8)
        self.inf_or_nan_tracker.zero_()
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.dp_process_group)
        return bool(flag.item())

    def _clip(self, norm: Tensor, scale: float) -> tuple[float, float]:
        """Clip coefficient and gradient factor by DeepSpeed's formula, in the precision of ``norm``."""
        if not self.clip_grad > 0.0:
            return 1.0, 1.0 / scale
        clip = torch.clamp((norm / scale + 1e-6) / self.clip_grad, min=1.0)
        return float(1.0 / clip), float(1.0 / (clip * scale))
