"""Defines what decides a training run's results, and checks it before the run starts. Loads no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from superoffload.errors import ArgumentError

# By name, the state_dtype and master_dtype that benchmarks compare; the first is the default.
STATE_SETTINGS = {
    "fp32": ("fp32", "fp32"),
    "split": ("fp32", "split"),
    "bf16": ("bf16", "fp32"),
    "bf16+split": ("bf16", "split"),
    "8bit": ("8bit", "fp32"),
    "8bit+split": ("8bit", "split"),
}


@dataclass(frozen=True)
class ModelConfig:
    """Holds the sizes of the transformer. `mlp` is the inner width of SwiGLU; `sequence` bounds the rotary tables.

    `vocabulary`: one token per byte value, unless a benchmark brings its own tokens.
    """

    layers: int = 3
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    mlp: int = 640
    sequence: int = 128
    tied: bool = False
    vocabulary: int = 256

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "mlp", "sequence", "vocabulary"):
            _check_at_least_one(name, getattr(self, name))
        if self.hidden % self.heads:
            raise ArgumentError(
                f"hidden={self.hidden} is not divisible by heads={self.heads}: "
                f"every head needs the same width; choose hidden as a multiple of heads"
            )
        if self.heads % self.kv_heads:
            raise ArgumentError(
                f"heads={self.heads} is not divisible by kv_heads={self.kv_heads}: "
                f"every key/value head serves the same number of query heads"
            )
        if self.head_width % 2:
            raise ArgumentError(
                f"hidden={self.hidden} with heads={self.heads} gives heads of width {self.head_width}: "
                f"rotary embeddings rotate pairs and need an even width"
            )

    @property
    def head_width(self) -> int:
        return self.hidden // self.heads


@dataclass(frozen=True)
class TrainingConfig:
    """Configures a run. `warmup=None`: a tenth of the steps, 20 at most; `threads=None` leaves the choice to AdamW."""

    model: ModelConfig = field(default_factory=ModelConfig)
    dtype: str = "bf16"
    compute: str = "auto"
    steps: int = 300
    batch: int = 16
    accumulation: int = 1
    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    warmup: int | None = None
    max_grad_norm: float | None = 1.0
    seed: int = 0
    speculation: str = "adaptive"
    state_dtype: str = "fp32"
    master_dtype: str = "fp32"
    bucket_numel: int = 1 << 18
    threads: int | None = None
    eval_batches: int = 4

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "accumulation", "bucket_numel", "eval_batches"):
            _check_at_least_one(name, getattr(self, name))
        if not 0 <= self.seed < 2**32:
            raise ArgumentError(f"seed={self.seed}: expected a whole number from 0 to {2**32 - 1}")

    @property
    def warmup_steps(self) -> int:
        return self.warmup if self.warmup is not None else max(1, min(20, self.steps // 10))

    def replace(self, **changes: Any) -> TrainingConfig:
        return dataclasses.replace(self, **changes)


def _check_at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ArgumentError(f"{name}={value}: expected a whole number, 1 or more")
