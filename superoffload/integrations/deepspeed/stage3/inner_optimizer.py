"""Wraps the optimizer that the user or the config names: reads its settings, shows the engine's state in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import Tensor

from superoffload.engine.bucket import GroupHyper
from superoffload.errors import StateError
from superoffload.host.memory import host_zeros
from superoffload.integrations.deepspeed.features import hyper_of
from superoffload.integrations.deepspeed.stage3.stock import StockStage3

MOMENTS = ("exp_avg", "exp_avg_sq")


class InnerOptimizer:
    """Owns moments and step counts, where DeepSpeed looks for them: in the state of torch's optimizer."""

    def __init__(self, stock: StockStage3, resident: frozenset[int]) -> None:
        """Takes ``resident``: the sub-groups whose moments are on the accelerator."""
        self._stock = stock
        for sub_group, flat in enumerate(stock.fp32_partitioned_groups_flat):
            state = self._state(flat)
            state["step"] = self._step_value(0)
            for name in MOMENTS:
                on_device = sub_group in resident
                state[name] = torch.zeros_like(flat.data) if on_device else host_zeros(flat.numel(), torch.float32)

    def _state(self, flat: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self._stock.optimizer.state[flat]
        return state

    def moments(self, sub_group: int) -> tuple[Tensor, Tensor]:
        """Returns exp_avg and exp_avg_sq of a sub-group's flat buffer."""
        state = self._state(self._stock.fp32_partitioned_groups_flat[sub_group])
        return state["exp_avg"], state["exp_avg_sq"]

    # ---- settings -------------------------------------------------------------------------------------------------

    def hyper(self, group: int) -> GroupHyper:
        """Reads a param group's present hyper-parameters."""
        return hyper_of(self._stock.optimizer, group)

    def settings(self) -> dict[str, Any]:
        """Returns the settings that must be the same on all ranks."""
        found: dict[str, Any] = {}
        for index in range(len(self._stock.optimizer.param_groups)):
            for name, value in asdict(self.hyper(index)).items():
                found[f"{name} of group {index}"] = value
        clip, scale = float(self._stock.clip_grad), float(self._stock.loss_scale)
        return {**found, "gradient_clipping": clip, "loss scale": scale}

    # ---- steps ----------------------------------------------------------------------------------------------------

    def refuse_hooks(self) -> None:
        """Refuses hooks around ``step()``, which is never called."""
        inner = self._stock.optimizer
        if inner._optimizer_step_pre_hooks or inner._optimizer_step_post_hooks:
            raise StateError("step hooks are not called under DeepSpeed; do around engine.step() what they do")

    def show_steps(self, steps: Sequence[int]) -> None:
        """Writes ``steps``, one number per sub-group, into the state."""
        for flat, done in zip(self._stock.fp32_partitioned_groups_flat, steps, strict=True):
            self._state(flat)["step"] = self._step_value(done)

    def stepped(self) -> None:
        """Marks the optimizer as stepped: torch's schedulers warn if ``step()`` was not called, and it never is."""
        self._stock.optimizer._opt_called = True

    def _step_value(self, steps: int) -> Any:
        """Converts a step count: DeepSpeedCPUAdam counts in an int, torch in a tensor."""
        return steps if isinstance(self._stock.optimizer, DeepSpeedCPUAdam) else torch.tensor(float(steps))

    # ---- loads ----------------------------------------------------------------------------------------------------

    def before_load(self) -> list[dict[str, Any]]:
        """Returns the state of every sub-group, since DeepSpeed replaces its tensors."""
        return [dict(self._state(flat)) for flat in self._stock.fp32_partitioned_groups_flat]

    def take_loaded(self, mine: Sequence[dict[str, Any]]) -> list[int]:
        """Moves loaded values into our moments, ``mine``, which shards point into; returns each sub-group's steps."""
        steps = []
        for flat, own in zip(self._stock.fp32_partitioned_groups_flat, mine, strict=True):
            loaded = self._state(flat)
            for name in MOMENTS:
                if name not in loaded:  # a stock checkpoint from before the first step has no state
                    own[name].zero_()
                elif loaded[name] is not own[name]:
                    own[name].copy_(loaded[name])
                loaded[name] = own[name]
            steps.append(int(loaded.get("step", 0)))
        return steps
