"""Defines what is measured: the sizes of the model, the tokens of a step, and everything else a row depends on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.training.config import ModelConfig
from superoffload.errors import ArgumentError

LR, BETAS, EPS, WEIGHT_DECAY = 1e-4, (0.9, 0.95), 1e-8, 0.1

# Thresholds of the gradient norm that every step stays below, or exceeds; a row tells what its run really did.
NEVER_CLIPS, ALWAYS_CLIPS = 1e6, 1e-3

GIB = 1 << 30
CAPPED_GIB, _CAPPED_MICRO_BATCH = 14.0, 2048  # GPU memory of the capped rows, and tokens of their micro-batches


@dataclass(frozen=True)
class Size:
    """Describes a size. ``tokens``: per step, the headline's first."""

    model: ModelConfig
    tokens: tuple[int, ...]
    micro_batch_tokens: int
    blocks: tuple[int, int, int]  # steps to warm up, blocks, steps of each block
    adam: tuple[int, float]  # parameters, seconds
    copy_bytes: int


# A billion parameters; everything on the GPU takes 20 bytes for each of them, so 20 GB without a single activation.
FULL = Size(
    ModelConfig(layers=16, hidden=2048, heads=32, kv_heads=8, mlp=8192, sequence=2048),
    tokens=(8192, 32768), micro_batch_tokens=16384, blocks=(4, 4, 5), adam=(1 << 26, 8.0), copy_bytes=1 << 28,
)  # fmt: skip
TOY = Size(
    ModelConfig(layers=2, hidden=64, heads=4, kv_heads=2, mlp=128, sequence=32),
    tokens=(64,), micro_batch_tokens=32, blocks=(1, 2, 1), adam=(1 << 14, 0.1), copy_bytes=1 << 20,
)  # fmt: skip


@dataclass(frozen=True)
class TrainRow:
    """Describes one contestant at one setting; travels as JSON to the processes that measure it, one per rank."""

    contestant: str
    device: str
    model: ModelConfig
    micro_batches: int
    batch: int
    warm_up: int
    blocks: int
    steps: int
    capped_gib: float | None = None
    seed: int = 0
    ranks: int = 1

    @property
    def tokens(self) -> int:
        """Counts a step's tokens on each rank."""
        return self.micro_batches * self.batch * self.model.sequence

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "tokens": self.tokens}

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> TrainRow:
        fields = {name: value for name, value in values.items() if name != "tokens"}
        return TrainRow(**{**fields, "model": ModelConfig(**values["model"])})


def train_row(
    contestant: str, device: str, size: Size, tokens: int, *, capped: bool = False, micro_batches: int | None = None
) -> TrainRow:
    """Splits ``tokens`` per step into micro-batches of the model's sequences, or shorter ones if they are fewer."""
    sequence = min(size.model.sequence, tokens)
    largest = _CAPPED_MICRO_BATCH if capped else size.micro_batch_tokens
    batch = max(1, min(largest, tokens // (micro_batches or 1)) // sequence)
    if tokens % (batch * sequence):
        raise ArgumentError(f"tokens={tokens}: expected a multiple of {batch * sequence}, the tokens of a micro-batch")
    count = micro_batches or tokens // (batch * sequence)
    model = replace(size.model, sequence=sequence)
    return TrainRow(contestant, device, model, count, batch, *size.blocks, CAPPED_GIB if capped else None)


def published_sizes(toy: bool) -> tuple[int, ...]:
    return (32, 64) if toy else (2048, 3072, 4096, 5120)


def published_row(contestant: str, device: str, ranks: int, hidden: int, toy: bool) -> TrainRow:
    """Returns the setting of Steiger, Zuidema and Dionysiou's evaluation of DeepSpeed (ETH Zurich, 2025,
    https://rahulsteiger.github.io/notes/2025/lsaie-project/): a sequence per GPU and step."""
    multiple = 16 if toy else 1024
    inner = multiple * math.ceil(int(1.3 * int(2 * 4 * hidden / 3)) / multiple)  # Llama's rule, times 1.3
    if toy:
        model = replace(TOY.model, hidden=hidden, mlp=inner, vocabulary=512)
        return TrainRow(contestant, device, model, 1, 4, *TOY.blocks, ranks=ranks)
    model = replace(FULL.model, layers=32, hidden=hidden, mlp=inner, vocabulary=131_072)
    return TrainRow(contestant, device, model, 1, 1, warm_up=100, blocks=9, steps=100, ranks=ranks)
