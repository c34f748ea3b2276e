"""Defines the setting of the published evaluation (source: benchmarks/planned_and_published.py), and a toy of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.planned_and_published import HIDDEN_SIZES, evaluated_model, swiglu_width
from benchmarks.training.config import ModelConfig

LR, BETAS, WEIGHT_DECAY, MAX_GRAD_NORM = 5e-5, (0.9, 0.95), 0.1, 1.0
SETTLED_FROM = 6  # throughput counts from this step on
SAMPLES = 100  # memory samples, evenly spread over the run


@dataclass(frozen=True)
class Run:
    """Describes one training run on some ranks; travels as JSON to the processes that do it."""

    engine: str
    device: str
    ranks: int
    model: ModelConfig
    steps: int
    warm_up: int
    batch: int = 1
    seed: int = 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Run:
        return Run(**{**values, "model": ModelConfig(**values["model"])})

    @property
    def tokens_per_step(self) -> int:
        return self.ranks * self.batch * self.model.sequence

    def learning_rate(self, step: int) -> float:
        """Returns a linear warm-up, then a constant rate; ``step`` from 0."""
        return LR * min(1.0, (step + 1) / self.warm_up)


def published_run(engine: str, device: str, ranks: int, hidden: int) -> Run:
    shape = evaluated_model(hidden)
    model = ModelConfig(
        layers=shape.layers,
        hidden=hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        mlp=shape.ffn,
        sequence=2048,
        vocabulary=shape.vocabulary,
    )
    return Run(engine, device, ranks, model, steps=1000, warm_up=100)


def toy_run(engine: str, device: str, ranks: int, hidden: int) -> Run:
    model = ModelConfig(
        layers=2, hidden=hidden, heads=4, kv_heads=2, mlp=swiglu_width(hidden, 16), sequence=32, vocabulary=512
    )
    return Run(engine, device, ranks, model, steps=12, warm_up=3, batch=4)


PUBLISHED_SIZES, TOY_SIZES = HIDDEN_SIZES, (32, 64)
