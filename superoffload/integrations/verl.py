"""Adapts verl: its FSDP2 engines clip, accumulate and offload with ``superoffload.AdamW``.

In verl's configuration: ``actor_rollout_ref.model.external_lib=superoffload.integrations.verl``. Or in the environment
of every worker: ``VERL_USE_EXTERNAL_MODULES=superoffload.integrations.verl``. docs/frameworks.md#verl has all of it.

verl clips between backward and ``step()``, which has the optimizer take every clipped gradient again. The engines of
this module hand ``clip_grad`` over to the optimizer's verdict, and let the optimizer sleep while verl keeps a model on
the CPU. verl's own ``EngineRegistry`` has them for this process's device and vendor, and prefers them to its engines
for the device alone. With another optimizer they do what verl's engines do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from superoffload.adamw import AdamW
from superoffload.errors import ArgumentError

try:
    from verl.utils.device import get_device_name, get_vendor
    from verl.workers.config.optimizer import build_optimizer
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine, FSDPEngineWithLMHead, FSDPEngineWithValueHead
except ImportError as error:
    raise ImportError(f"superoffload.integrations.verl needs what docs/frameworks.md#verl says: {error}") from error

_OURS_TO_SET = ("params", "model", "module", "max_grad_norm")


class OffloadingEngine(FSDPEngine):
    """Overrides what verl's FSDP engine does with an optimizer, if that is a ``superoffload.AdamW``."""

    def _build_optimizer(self, module: nn.Module) -> Any:
        config = self.optimizer_config
        if (config.optimizer_impl, config.optimizer) != ("superoffload", "AdamW"):
            return super()._build_optimizer(module)
        options = dict(config.override_optimizer_config or {})
        for name in _OURS_TO_SET:
            if name in options:
                raise ArgumentError(
                    f"override_optimizer_config: {name}={options[name]!r}, which superoffload.integrations.verl sets "
                    "by itself; clip_grad is the norm to clip to"
                )
        options["module" if options.get("delivery") == "on_demand" else "model"] = module
        options["max_grad_norm"] = config.clip_grad
        return build_optimizer(module.parameters(), replace(config, override_optimizer_config=options))

    @property
    def _adamw(self) -> AdamW | None:
        return self.optimizer if isinstance(self.optimizer, AdamW) else None

    @contextmanager
    def _gradient_sync_context(self, *, is_last_micro_batch: bool) -> Iterator[None]:
        """Wakes the optimizer for training, and keeps it from stepping before the last micro-batch of a step."""
        adamw = self._adamw
        if adamw is not None:
            adamw.wake()
        more_to_come = nullcontext() if adamw is None or is_last_micro_batch else adamw.accumulate()
        with super()._gradient_sync_context(is_last_micro_batch=is_last_micro_batch), more_to_come:
            yield

    def optimizer_step(self) -> float:
        """Steps, or skips a step whose gradients are not finite; returns the norm before clipping."""
        adamw = self._adamw
        if adamw is None:
            return float(super().optimizer_step())
        adamw.max_grad_norm = self.optimizer_config.clip_grad
        if self.scaler is None:
            adamw.step()
        else:
            self.scaler.step(adamw)
            self.scaler.update()
        if self._qat_enabled:
            from verl.utils.qat.core import invalidate_all_scales

            invalidate_all_scales(self.module)
        if not math.isfinite(adamw.grad_norm):
            print(f"WARN: grad_norm is not finite: {adamw.grad_norm}")
        return adamw.grad_norm

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Has the optimizer sleep where verl offloads its state, or the parameters that it trains."""
        adamw = self._adamw
        if adamw is None:
            super().to(device=device, model=model, optimizer=optimizer, grad=grad)
            return
        leaves = device == "cpu" != get_device_name()
        if leaves and (model or optimizer):
            adamw.sleep()
        super().to(device=device, model=model, optimizer=False, grad=grad)
        if optimizer and not leaves:
            adamw.wake()

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = True, **more: Any
    ) -> None:
        """Wakes the optimizer for the load, which verl's engine leaves offloaded."""
        if self._adamw is None:
            super().load_checkpoint(local_path, hdfs_path, del_local_after_load, **more)
            return
        params, state = self.is_param_offload_enabled, self.is_optimizer_offload_enabled
        self.to(get_device_name(), model=params, optimizer=True, grad=False)
        self.checkpoint_manager.load_checkpoint(local_path, hdfs_path, del_local_after_load)
        torch.distributed.barrier()
        self.to("cpu", model=params, optimizer=state, grad=False)


class LanguageModelEngine(OffloadingEngine, FSDPEngineWithLMHead):
    """Trains actors, and models in supervised fine-tuning."""


class ValueModelEngine(OffloadingEngine, FSDPEngineWithValueHead):
    """Trains critics."""


for _model_type, _engine in (("language_model", LanguageModelEngine), ("value_model", ValueModelEngine)):
    _register = EngineRegistry.register(_model_type, backend="fsdp2", device=get_device_name(), vendor=get_vendor())
    _register(_engine)
