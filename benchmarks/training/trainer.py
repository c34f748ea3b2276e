"""Runs the training loop of benchmarks: micro-batches, backward, step, one record per step.

It uses `superoffload.AdamW` as any training script would: accumulate() around all but the last backward, step(),
zero_grad(), a torch scheduler. The optimizer clips gradients itself (`max_grad_norm`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.training.config import TrainingConfig
from benchmarks.training.corpus import BatchSource, Corpus, held_out_batches
from benchmarks.training.model import DTYPES, Transformer, build_model, compute_dtype
from superoffload.adamw import AdamW

FINAL_FRACTION = 0.1  # of the learning rate, at the end of a run


@dataclass(frozen=True)
class StepRecord:
    """``counters``: what the optimizer's ``stats()`` grew by in this step."""

    loss: float
    grad_norm: float
    counters: Mapping[str, float]


def learning_rate_factor(step: int, warmup: int, steps: int) -> float:
    """Returns the share of the base learning rate at zero-based `step`: linear warm-up, then a cosine to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return FINAL_FRACTION + (1.0 - FINAL_FRACTION) * 0.5 * (1.0 + math.cos(math.pi * progress))


def warmup_cosine(optimizer: Optimizer, warmup: int, steps: int) -> LambdaLR:
    """Returns the schedule as an ordinary torch scheduler, which users attach to the optimizer."""
    return LambdaLR(optimizer, lambda step: learning_rate_factor(step, warmup, steps))


def build_optimizer(model: Transformer, config: TrainingConfig) -> AdamW:
    """Returns AdamW with weight decay on matrices and none on norm weights, as two param groups."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    norms = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": norms, "weight_decay": 0.0},
    ]
    return AdamW(
        groups,
        lr=config.lr,
        betas=config.betas,
        max_grad_norm=config.max_grad_norm,
        speculation=config.speculation,
        bucket_numel=config.bucket_numel,
        threads=config.threads,
        state_dtype=config.state_dtype,
        master_dtype=config.master_dtype,
        seed=config.seed,
    )


class Trainer:
    """Runs one training, a step at a time. Close it (or use `with`) to end the optimizer's worker threads.

    ``late_clip``: from the second step on, max_grad_norm is set to this share of the norm before, between backward and
    step(), when every bucket is speculated.
    """

    def __init__(self, config: TrainingConfig, corpus: Corpus, late_clip: float | None = None) -> None:
        self.config = config
        self.model = build_model(
            config.model, DTYPES[config.dtype], compute_dtype(DTYPES[config.dtype], config.compute), config.seed
        )
        self.optimizer = build_optimizer(self.model, config)
        self._scheduler = warmup_cosine(self.optimizer, config.warmup_steps, config.steps)
        self._late_clip = late_clip
        sequence = config.model.sequence
        self._batches = BatchSource(corpus.train, config.batch, sequence, config.seed + 1)
        self._held_out = held_out_batches(corpus.held_out, config.batch, sequence, config.eval_batches)
        self._last_norm: float | None = None

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.optimizer.close()

    @torch.no_grad()
    def evaluate(self) -> float:
        """Returns the mean loss on the held-out text, in nats per byte."""
        return math.fsum(self.model.loss(tokens).item() for tokens in self._held_out) / len(self._held_out)

    def train_step(self) -> StepRecord:
        optimizer = self.optimizer
        before = optimizer.stats()
        losses = []
        for _ in range(self.config.accumulation - 1):
            with optimizer.accumulate():
                losses.append(self._backward())
        losses.append(self._backward())
        if self._late_clip is not None and self._last_norm is not None:
            optimizer.max_grad_norm = self._late_clip * self._last_norm
        optimizer.step()
        optimizer.zero_grad()
        optimizer.max_grad_norm = self.config.max_grad_norm
        self._scheduler.step()
        norm = float(optimizer.grad_norm)
        if math.isfinite(norm):
            self._last_norm = norm
        return self._record(losses, norm, before)

    def _backward(self) -> Tensor:
        loss = self.model.loss(self._batches.next())
        (loss / self.config.accumulation).backward()
        return loss.detach()

    def _record(self, losses: list[Tensor], norm: float, before: Mapping[str, Any]) -> StepRecord:
        after = self.optimizer.stats()
        return StepRecord(
            loss=math.fsum(loss.item() for loss in losses) / len(losses),
            grad_norm=norm,
            counters={name: after[name] - before[name] for name in after},
        )
