"""What to recommend: the fastest settings that fit, the largest model that fits, and the configuration to paste."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from superoffload.errors import ArgumentError
from superoffload.plan.hardware import Hardware
from superoffload.plan.memory import ENGINES, SHARDINGS, Fit, Settings, check_fit
from superoffload.plan.models import ModelShape, typical_shape
from superoffload.plan.step_time import StepTime, estimate_step


@dataclass(frozen=True)
class Choice:
    settings: Settings
    fit: Fit
    step: StepTime

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks."""
        return self.settings.tokens_per_step * self.settings.ranks / self.step.total


def evaluate(model: ModelShape, hardware: Hardware, settings: Settings) -> Choice:
    return Choice(settings, check_fit(model, hardware, settings), estimate_step(model, hardware, settings))


def all_choices(model: ModelShape, hardware: Hardware, base: Settings) -> list[Choice]:
    """Every engine, sharding and checkpointing for the ranks and batch of `base`, the fastest first."""
    choices = [evaluate(model, hardware, settings) for settings in _variants(base)]
    return sorted(choices, key=lambda choice: -choice.tokens_per_second)


def _variants(base: Settings) -> Iterator[Settings]:
    for engine in ENGINES:
        for sharding in SHARDINGS:
            if sharding != "none" and base.ranks == 1 and engine not in ("zero-offload", "deepspeed-superoffload"):
                continue
            for checkpointing in ("none", "full"):
                try:
                    yield replace(base, engine=engine, sharding=sharding, checkpointing=checkpointing)
                except ArgumentError:  # a combination that does not exist
                    continue


def recommend(model: ModelShape, hardware: Hardware, base: Settings) -> Choice | None:
    """The fastest that fits, of what steps the optimizer exactly: on the GPU, or with superoffload."""
    fitting = [
        choice
        for choice in all_choices(model, hardware, base)
        if choice.fit.fits and choice.settings.engine in ("torch", "superoffload")
    ]
    return fitting[0] if fitting else None


def largest_model(hardware: Hardware, settings: Settings) -> ModelShape | None:
    """The largest decoder of usual proportions that fits with these settings; None if not even one of 10 M does."""
    low, high = 1e7, 4e12
    if not _fits(low, hardware, settings):
        return None
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if _fits(middle, hardware, settings) else (low, middle)
    return typical_shape(low)


def _fits(parameters: float, hardware: Hardware, settings: Settings) -> bool:
    return check_fit(typical_shape(parameters), hardware, settings).fits


def configuration(settings: Settings) -> str:
    """What to paste: a DeepSpeed JSON, or the line that makes the optimizer."""
    clipping = 1.0
    if settings.sharding.startswith("zero"):
        stage = int(settings.sharding[-1])
        zero: dict[str, Any] = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True}
        device = {
            "zero-offload": {"device": "cpu", "pin_memory": True},
            "deepspeed-superoffload": {
                "device": "cpu", "pin_memory": True, "super_offload": True, "ratio": 0.9, "cpuadam_cores_perc": 0.9,
            },
            "superoffload": {"device": "superoffload", "pin_memory": True},
        }  # fmt: skip
        if settings.engine in device:
            zero["offload_optimizer"] = device[settings.engine]
        values = {
            "bf16": {"enabled": True},
            "train_micro_batch_size_per_gpu": settings.micro_batch,
            "gradient_accumulation_steps": settings.accumulation,
            "gradient_clipping": clipping,
            "zero_optimization": zero,
        }
        return json.dumps(values, indent=2)
    wrap = "fully_shard(model)  # torch.distributed.fsdp, each block first\n" if settings.sharding == "fsdp2" else ""
    if settings.engine == "torch":
        return wrap + "optimizer = torch.optim.AdamW(model.parameters(), fused=True)"
    extra = ', state_dtype="bf16"' if settings.state_dtype == "bf16" else ""
    return wrap + f"optimizer = superoffload.AdamW(model.parameters(), max_grad_norm={clipping}{extra})"
