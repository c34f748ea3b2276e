"""Records one training step as a line of `metrics.jsonl`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

BUCKET_FATES = ("committed", "undone", "replayed", "skipped", "abandoned")


@dataclass(frozen=True)
class StepRecord:
    """Records a step; `grad_norm` and `clip_coefficient` are None if step() was not reached; `counters` are its own."""

    COUNTERS: ClassVar[tuple[str, ...]] = (
        "buckets_speculated",
        *(f"buckets_{fate}" for fate in BUCKET_FATES),
        "buckets_stepped",
        "buckets_two_phase",
        "optimizer_seconds",
        "optimizer_seconds_exposed",
    )

    step: int
    loss: float
    lr: float
    grad_norm: float | None
    clip_coefficient: float | None
    found_inf: bool
    stepped: bool
    tokens: int
    seconds: float
    events: tuple[str, ...] = ()
    counters: Mapping[str, float] = field(default_factory=dict)
    held_out_loss: float | None = None

    @property
    def clipped(self) -> bool:
        return self.clip_coefficient is not None and self.clip_coefficient < 1.0

    @property
    def exposed_seconds(self) -> float:
        return self.counters.get("optimizer_seconds_exposed", 0.0)

    @property
    def hidden_seconds(self) -> float:
        """Returns optimizer time behind backward; exposed waiting on a busy CPU can exceed the work itself."""
        return max(0.0, self.counters.get("optimizer_seconds", 0.0) - self.exposed_seconds)

    def with_held_out_loss(self, loss: float) -> StepRecord:
        return dataclasses.replace(self, held_out_loss=loss)

    def as_json(self) -> dict[str, Any]:
        """Returns a flat JSON object, with null for NaN and Infinity, which JSON does not have."""
        values = dataclasses.asdict(self)
        values.update(values.pop("counters"))
        values["events"] = list(self.events)
        values["tokens_per_second"] = self.tokens / self.seconds
        return {name: finite_or_none(value) for name, value in values.items()}


def unclipped_steps(stats: Mapping[str, Any]) -> int:
    """Counts the steps that keep their speculated buckets."""
    return int(stats["steps"] - stats["clipped_steps"])


def finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
