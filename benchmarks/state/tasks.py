"""What trainings that compare settings of state have in common, and the demo's training as one of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from benchmarks.adam.eight_bit_peers import PEERS, EightBitPeer
from benchmarks.training.config import STATE_SETTINGS, TrainingConfig
from benchmarks.training.corpus import BatchSource, Corpus, held_out_batches
from benchmarks.training.model import DTYPES, build_model, compute_dtype
from superoffload.adamw import AdamW

Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class Training:
    """Holds one run: bf16 parameters in groups, the loss of its next batch, its held-out loss.

    ``masters``: fp32 values that the parameters were rounded from, in their order; None: they are fp32 by themselves.
    """

    groups: Groups
    loss: Callable[[], Tensor]
    held_out: Callable[[], float]
    masters: list[Tensor] | None = None


class Task(Protocol):
    """Starts trainings that differ by seed alone."""

    unit: str  # of its losses
    steps: int
    lr: float
    betas: tuple[float, float]
    warmup: int
    max_grad_norm: float | None

    def describe(self) -> dict[str, Any]:
        """Returns what the figures are about: the data and the model."""

    def start(self, seed: int) -> Training:
        """Begins a training: weights, order of batches and rounding follow from ``seed``."""


class TextTask:
    """Trains the demo's model on bytes of text, as `benchmarks.training` does."""

    unit = "nats per byte"

    def __init__(self, config: TrainingConfig, corpus: Corpus) -> None:
        self.steps, self.lr, self.betas = config.steps, config.lr, config.betas
        self.warmup, self.max_grad_norm = config.warmup_steps, config.max_grad_norm
        self._config = config
        self._corpus = corpus

    def describe(self) -> dict[str, Any]:
        return {"corpus": self._corpus.describe()}

    def start(self, seed: int) -> Training:
        config, sequence = self._config, self._config.model.sequence
        dtype = DTYPES[config.dtype]
        model = build_model(config.model, dtype, compute_dtype(dtype, config.compute), seed)
        batches = BatchSource(self._corpus.train, config.batch, sequence, seed + 1)
        held_out = held_out_batches(self._corpus.held_out, config.batch, sequence, config.eval_batches)
        return Training(
            decayed_groups(model, config.weight_decay),
            loss=lambda: model.loss(batches.next()),
            held_out=lambda: mean_loss([model.loss(tokens) for tokens in held_out]),
        )


def decayed_groups(model: nn.Module, weight_decay: float) -> Groups:
    """Returns two param groups: matrices, which decay, and the others."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def mean_loss(losses: list[Tensor]) -> float:
    return math.fsum(loss.item() for loss in losses) / len(losses)


# ---- optimizers -----------------------------------------------------------------------------------------------------


class Steps(Protocol):
    """Steps the parameters of a training."""

    @property
    def scheduled(self) -> torch.optim.Optimizer:
        """Returns the optimizer whose learning rate a scheduler sets."""

    def step(self) -> None: ...
    def zero_grad(self) -> None: ...
    def close(self) -> None: ...


def optimizer_of(setting: str, training: Training, task: Task, seed: int) -> Steps:
    """Makes the optimizer of a setting: ours, or a peer's over fp32 masters."""
    if setting in PEERS:
        return PeerSteps(PEERS[setting], training, task)
    return OurSteps(setting, training, task, seed)


class OurSteps:
    """Steps by ``superoffload.AdamW`` with a setting of moments and masters."""

    def __init__(self, setting: str, training: Training, task: Task, seed: int) -> None:
        moments, masters = STATE_SETTINGS[setting]
        self.scheduled = AdamW(
            training.groups,
            lr=task.lr,
            betas=task.betas,
            max_grad_norm=task.max_grad_norm,
            bucket_numel=1 << 18,
            state_dtype=moments,
            master_dtype=masters,
            seed=seed,
        )
        if training.masters is not None:
            self.scheduled.load_masters(training.masters)

    def step(self) -> None:
        self.scheduled.step()

    def zero_grad(self) -> None:
        self.scheduled.zero_grad()

    def close(self) -> None:
        self.scheduled.close()


class PeerSteps:
    """Steps fp32 masters of the parameters by another library's optimizer, so that only moments differ from ours."""

    def __init__(self, peer: EightBitPeer, training: Training, task: Task) -> None:
        self._max_grad_norm = task.max_grad_norm
        self._params = [param for group in training.groups for param in group["params"]]
        given = training.masters or [param.detach().float() for param in self._params]
        self._masters = [nn.Parameter(value.clone()) for value in given]
        masters = iter(self._masters)
        groups = [{**group, "params": [next(masters) for _ in group["params"]]} for group in training.groups]
        self.scheduled = peer.optimizer(groups, lr=task.lr, betas=task.betas)

    @torch.no_grad()
    def step(self) -> None:
        for param, master in zip(self._params, self._masters, strict=True):
            master.grad = None if param.grad is None else param.grad.float()
        if self._max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._masters, self._max_grad_norm)
        self.scheduled.step()
        for param, master in zip(self._params, self._masters, strict=True):
            param.copy_(master)

    def zero_grad(self) -> None:
        for param in self._params:
            param.grad = None

    def close(self) -> None: ...
