"""Defines the sizes of a model, and the settings of state that benchmarks compare. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass

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
    vocabulary: int = 256

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ArgumentError(f"{name}={value}: expected a whole number, 1 or more")
        if self.hidden % self.heads:
            raise ArgumentError(f"hidden={self.hidden} is not divisible by heads={self.heads}: choose a multiple")
        if self.heads % self.kv_heads:
            raise ArgumentError(f"heads={self.heads} is not divisible by kv_heads={self.kv_heads}: choose a multiple")
        if self.head_width % 2:
            raise ArgumentError(f"heads of width {self.head_width}: rotary embeddings need an even width")

    @property
    def head_width(self) -> int:
        return self.hidden // self.heads
