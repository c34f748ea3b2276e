"""Trains once on this rank, with clips, a NaN and an infinity on the way, and returns what to compare."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.training.corpus import BatchSource, load_corpus
from benchmarks.training.schedule import learning_rate_factor
from tests.convergence.engines import BaseEngine, Step, make_engine, world
from tests.convergence.setup import Setup


@dataclass
class Curve:
    """Records a run: ``losses`` are means over all ranks, ``norms`` the optimizer's, ``digests`` this rank's."""

    speculation: str
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    digests: dict[int, dict[str, str]] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    stats: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def run(setup: Setup, name: str, speculation: str, *, order: int = 0) -> Curve:
    """Trains one run. ``order`` above 0: the same gradients are summed in another order, drawn from it.

    An error ends the training and is part of the result.
    """
    curve = Curve(speculation)
    rank, count = world() if name != "single" else (0, 1)
    corpus = load_corpus(setup.model.sequence, setup.corpus_bytes)
    if setup.device == "cuda":
        torch.use_deterministic_algorithms(True)
    batches = BatchSource(corpus.train, setup.batch, setup.model.sequence, setup.seed + 1)
    engine = make_engine(name, setup, speculation)
    try:
        for step in range(1, setup.steps + 1):
            tokens = batches.next().to(setup.device)
            micro_batches = _share(tokens, setup, engine.share, order * 100_003 + step if order else 0)
            try:
                _step(engine, setup, step, micro_batches, rank, count, curve)
            except Exception as error:
                curve.error = f"step {step}: {type(error).__name__}: {error}"
                return curve
        curve.weights, curve.stats = engine.weights(), engine.stats()
    finally:
        engine.close()
    return curve


def _share(tokens: Tensor, setup: Setup, share: tuple[int, int], order: int) -> Sequence[Tensor]:
    """Returns this rank's micro-batches of the global batch."""
    if not order:
        return tokens[setup.rows(*share)].chunk(setup.micro_batches)
    shuffled = tokens[torch.randperm(len(tokens), generator=torch.Generator().manual_seed(order)).to(tokens.device)]
    # As many backward passes as several ranks would make, to sum as many rounded gradients.
    return shuffled[setup.rows(*share)].chunk(setup.micro_batches * (1, 2, 4)[order % 3])


def _step(
    engine: BaseEngine, setup: Setup, step: int, micro_batches: Sequence[Tensor], rank: int, count: int, curve: Curve
) -> None:
    finite = [norm for norm in curve.norms if math.isfinite(norm)]
    loss, norm = engine.train(
        Step(
            micro_batches,
            lr=setup.lr * learning_rate_factor(step - 1, setup.warmup, setup.steps),
            max_grad_norm=setup.max_grad_norm,
            scale=math.inf if step == setup.inf_step and rank == 0 else 1.0,
            nan=step == setup.nan_step,
            last_rank=rank == count - 1,
            broken=step in (setup.nan_step, setup.inf_step),
            late_norm=finite[-1] / 3 if step in setup.late_clips and finite else None,
        )
    )
    if count > 1:
        total = torch.tensor([loss], dtype=torch.float64)
        dist.all_reduce(total)
        loss = float(total) / count
    curve.losses.append(loss)
    curve.norms.append(norm if math.isfinite(norm) else math.inf)
    if step % setup.digest_every == 0 or step == setup.steps:
        curve.digests[step] = engine.digests()
