"""Faults that tests plant in the ZeRO-3 optimizer of one rank."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch


def skip_publish(engine: Any) -> None:
    """One bucket of this step is not delivered."""
    link = engine.optimizer.parts.driver.engine.link
    deliver = link.deliver

    def lost(bucket: Any, after: Any) -> Any:
        link.deliver = deliver
        return after

    link.deliver = lost


def drop_clip(engine: Any) -> None:
    """This rank steps as if nothing had to be clipped, and reports that it did."""
    steps: Any = import_module("superoffload.integrations.deepspeed.stage3.steps")
    clip = steps.clip

    def unclipped(norm: torch.Tensor, scale: float, threshold: float) -> tuple[float, float]:
        steps.clip = clip
        coefficient, _ = clip(norm, scale, threshold)
        assert coefficient < 1.0, "nothing was clipped, so nothing was planted"
        return coefficient, 1.0 / scale

    steps.clip = unclipped
