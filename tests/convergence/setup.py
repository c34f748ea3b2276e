"""Defines what all runs of one comparison share."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.training.config import ModelConfig
from superoffload.errors import ArgumentError

_SMALL = ModelConfig(layers=2, hidden=48, heads=4, kv_heads=2, mlp=128, sequence=32)


@dataclass(frozen=True)
class Setup:
    """Defines the model, the data and the faults of a run; everything else is the engine's.

    ``experts``: in the place of each feed-forward layer; 0: none.

    ``batch`` windows make the global batch of a step, whatever the number of ranks, in ``micro_batches`` backward
    passes per rank. At ``nan_step`` one shard of the last rank gets a NaN, at ``inf_step`` the loss of the first rank
    is infinite; at the ``late_clips`` steps max_grad_norm drops to a third of the norm before between backward and
    step(). Every ``digest_every`` steps the state is digested.
    """

    model: ModelConfig = field(default=_SMALL)
    steps: int = 200
    dtype: str = "bf16"
    batch: int = 8
    micro_batches: int = 2
    lr: float = 2e-3
    warmup: int = 10
    max_grad_norm: float = 1.0
    seed: int = 0
    bucket_numel: int = 4096
    nan_step: int = 17
    inf_step: int = 29
    late_clips: tuple[int, ...] = (23, 24, 41)
    digest_every: int = 10
    corpus_bytes: int = 1 << 20
    rank_check: Any = "light"
    delivery: str = "eager"
    experts: int = 0
    device: str = "cpu"

    def for_ranks(self, count: int) -> Setup:
        """Returns this setup with the next larger global batch that so many ranks can cut alike."""
        least = count * self.micro_batches
        return replace(self, batch=-(-self.batch // least) * least)

    def rows(self, rank: int, world: int) -> slice:
        """Returns one rank's rows of the global batch."""
        if self.batch % (world * self.micro_batches):
            raise ArgumentError(
                f"batch={self.batch}: not divisible by {world} ranks x {self.micro_batches} micro-batches; expected a "
                "global batch that every rank can cut alike"
            )
        share = self.batch // world
        return slice(rank * share, (rank + 1) * share)
