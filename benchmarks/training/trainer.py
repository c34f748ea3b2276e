"""Runs the training loop: micro-batches, backward, step, one record per step, and injected faults.

It uses `superoffload.AdamW` as any training script would: accumulate() around all but the last backward, step(),
zero_grad(), a torch scheduler. The optimizer clips gradients itself (`max_grad_norm`).
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.training.config import TrainingConfig
from benchmarks.training.corpus import BatchSource, Corpus, held_out_batches
from benchmarks.training.injection import InjectedError, Injection, StepEvents, poisoned
from benchmarks.training.model import DTYPES, Transformer, build_model, compute_dtype
from benchmarks.training.record import StepRecord
from superoffload.adamw import AdamW
from superoffload.timeline import span

FINAL_FRACTION = 0.1  # of the learning rate, at the end of a run


def learning_rate_factor(step: int, warmup: int, steps: int) -> float:
    """Returns the share of the base learning rate at zero-based `step`: linear warm-up, then a cosine to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return FINAL_FRACTION + (1.0 - FINAL_FRACTION) * 0.5 * (1.0 + math.cos(math.pi * progress))


def warmup_cosine(optimizer: Optimizer, warmup: int, steps: int) -> LambdaLR:
    """Returns the schedule as an ordinary torch scheduler, which users attach to the optimizer."""
    return LambdaLR(optimizer, lambda step: learning_rate_factor(step, warmup, steps))


def build_optimizer(model: Transformer, config: TrainingConfig, trace: str | None = None) -> AdamW:
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
        trace=trace,
        state_dtype=config.state_dtype,
        master_dtype=config.master_dtype,
        seed=config.seed,
    )


class Trainer:
    """Runs one training, a step at a time. Close it (or use `with`) to end the optimizer's worker threads."""

    def __init__(self, config: TrainingConfig, corpus: Corpus, injection: Injection, trace: str | None = None) -> None:
        self.config = config
        self.compute = compute_dtype(DTYPES[config.dtype], config.compute)
        self.model = build_model(config.model, DTYPES[config.dtype], self.compute, config.seed)
        self.optimizer = build_optimizer(self.model, config, trace)
        self.scheduler = warmup_cosine(self.optimizer, config.warmup_steps, config.steps)
        self._injection = injection
        sequence = config.model.sequence
        self._batches = BatchSource(corpus.train, config.batch, sequence, config.seed + 1)
        self._held_out = held_out_batches(corpus.held_out, config.batch, sequence, config.eval_batches)
        self._last_norm: float | None = None

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self.optimizer.close()

    @torch.no_grad()
    def evaluate(self) -> float:
        """Returns the mean loss on the held-out text, in nats per byte."""
        return math.fsum(self.model.loss(tokens).item() for tokens in self._held_out) / len(self._held_out)

    def train_step(self, step: int, before_step: Callable[[], None] | None = None) -> StepRecord:
        """Runs step number `step` (from 1). Calls `before_step` between backward and step()."""
        events = self._injection.at(step)
        optimizer = self.optimizer
        stats_before = optimizer.stats()
        if events.threshold is not None and not events.threshold.late:
            optimizer.max_grad_norm = events.threshold.resolve(self._last_norm)
        started = time.perf_counter()
        if events.drop:
            self._window(StepEvents())
            optimizer.zero_grad()
        loss = self._window(events)
        if events.again:
            self._backward()
        if before_step is not None:
            before_step()
        stepped = self._step(events)
        lr = float(optimizer.param_groups[0]["lr"])  # the event's, until the scheduler sets the next one
        optimizer.zero_grad()
        seconds = time.perf_counter() - started
        optimizer.max_grad_norm = self.config.max_grad_norm
        with warnings.catch_warnings():
            # torch warns when the scheduler steps first, as it does with an exception injected at step 1.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step", category=UserWarning)
            self.scheduler.step()
        return self._record(step, loss, lr, seconds, stepped, events, stats_before)

    def _step(self, events: StepEvents) -> bool:
        """Calls step(), or, if injected user code raises first, gives the step up as such code would."""
        try:
            if events.raises:
                raise InjectedError("injected between backward and step()")
            if events.threshold is not None and events.threshold.late:
                self.optimizer.max_grad_norm = events.threshold.resolve(self._last_norm)
            if events.learning_rate_factor is not None:
                for group in self.optimizer.param_groups:
                    group["lr"] *= events.learning_rate_factor
            self.optimizer.step()
        except InjectedError:
            return False
        return True

    def _window(self, events: StepEvents) -> float:
        """Runs all micro-batches of one step, the boundary last; returns the mean loss."""
        losses = []
        for _ in range(self.config.accumulation - 1):
            with self.optimizer.accumulate():
                losses.append(self._backward())
        # Backward finishes the head's gradient first, the embedding's last. Tied, they are one tensor, finished last,
        # and the final norm's comes first.
        head, embedding = self.model.head.weight, self.model.embedding.weight
        earliest = self.model.norm.weight if head is embedding else head
        with poisoned(events, earliest, embedding):
            losses.append(self._backward())
        return math.fsum(loss.item() for loss in losses) / len(losses)

    def _backward(self) -> Tensor:
        with span(self.optimizer.timeline, "forward"):
            loss = self.model.loss(self._batches.next())
        (loss / self.config.accumulation).backward()
        return loss.detach()

    def _record(
        self,
        step: int,
        loss: float,
        lr: float,
        seconds: float,
        stepped: bool,
        events: StepEvents,
        stats_before: dict[str, Any],
    ) -> StepRecord:
        optimizer = self.optimizer
        verdict = optimizer.last_verdict if stepped else None
        if verdict is not None and math.isfinite(verdict.grad_norm):
            self._last_norm = verdict.grad_norm
        stats = optimizer.stats()
        return StepRecord(
            step=step,
            loss=loss,
            lr=lr,
            grad_norm=verdict.grad_norm if verdict is not None else None,
            clip_coefficient=verdict.clip_coefficient if verdict is not None else None,
            found_inf=verdict is not None and verdict.found_inf,
            stepped=stepped,
            tokens=self.config.tokens_per_step,
            seconds=seconds,
            events=events.texts,
            counters={name: stats[name] - stats_before[name] for name in StepRecord.COUNTERS},
        )
