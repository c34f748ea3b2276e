"""Trains the model in two pipeline stages, with torch's 1F1B schedule, as engine ``pp``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.training.model import Transformer
from tests.convergence.engines import BaseEngine, sharded
from tests.convergence.meshes import PAIR, mesh_of
from tests.convergence.setup import Setup


class Stage(nn.Module):
    """Holds half of the blocks, under the names that they have in the whole model; the first stage the embedding too,
    the last one the norm and the head."""

    cos: Tensor
    sin: Tensor

    def __init__(self, model: Transformer, *, last: bool) -> None:
        super().__init__()
        self.last, self.compute, half = last, model.compute, len(model.blocks) // PAIR
        mine = range(half, len(model.blocks)) if last else range(half)
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in mine})
        if last:
            self.norm, self.head = model.norm, model.head
        else:
            self.embedding = model.embedding
        self.register_buffer("cos", model.cos, persistent=False)
        self.register_buffer("sin", model.sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps tokens to activations, or activations to logits."""
        sequence = x.shape[1]
        if not self.last:
            x = self.embedding(x).to(self.compute)
        cos, sin = self.cos[:sequence].to(x.dtype), self.sin[:sequence].to(x.dtype)
        for block in self.blocks.values():
            x = block(x, cos, sin)
        return self.head(self.norm(x)) if self.last else x


class PipelineStages(BaseEngine):
    """Puts the first half of the ranks on one stage and the second half on the other; if there are more than two,
    ``fully_shard`` shards each stage over its ranks."""

    def __init__(self, setup: Setup, speculation: str) -> None:
        self._mesh = mesh_of(PAIR, dist.get_world_size() // PAIR, names=("stage", "data"))
        super().__init__(setup, speculation)
        self._scale = 1.0
        self.model.register_forward_hook(self._scaled)
        self._schedule = self._make_schedule()

    def build(self, setup: Setup) -> Stage:
        return Stage(super().build(setup), last=self._mesh.get_local_rank("stage") == PAIR - 1)

    def wrap(self, model: Stage) -> nn.Module:
        return model if self._mesh["data"].size() == 1 else sharded(model, self.setup.dtype, self._mesh["data"])

    @property
    def share(self) -> tuple[int, int]:
        return self._mesh.get_local_rank("data"), self._mesh["data"].size()  # both stages have the same one

    def _make_schedule(self) -> Any:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        model, rows = self.setup.model, self.setup.rows(*self.share)
        shape = (rows.stop - rows.start) // self.setup.micro_batches, model.sequence
        tokens, passed = torch.zeros(shape, dtype=torch.int64), torch.zeros(*shape, model.hidden, requires_grad=True)
        given, made = (passed, torch.zeros(*shape, model.vocabulary)) if self.inner.last else (tokens, passed)
        stage = PipelineStage(
            self.model, self._mesh.get_local_rank("stage"), PAIR, torch.device("cpu"), given, made,
            group=self._mesh.get_group("stage"),
        )  # fmt: skip
        # It would scale gradients after the optimizer has taken them.
        return Schedule1F1B(stage, self.setup.micro_batches, self._loss, scale_grads=False)

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()) / self.setup.micro_batches

    def backward(self, micro_batches: Sequence[Tensor], scale: float) -> float:
        tokens, losses = torch.cat(tuple(micro_batches)), list[Tensor]()
        self._scale = scale
        if self.inner.last:
            self._schedule.step(target=tokens[:, 1:], losses=losses, return_outputs=False)
        else:
            self._schedule.step(tokens[:, :-1], return_outputs=False)
        loss = torch.tensor(math.fsum(loss.item() for loss in losses), dtype=torch.float64)
        dist.all_reduce(loss, group=self._mesh.get_group("stage"))
        return float(loss)

    def _scaled(self, stage: nn.Module, given: Any, made: Tensor) -> None:
        """Scales the gradients of this stage alone: one rank's, where the scale is infinite."""
        if self._scale != 1.0 and made.requires_grad:
            made.register_hook(lambda grad, scale=self._scale: grad * scale)

    def weights(self) -> dict[str, Tensor]:
        parts: list[Any] = [None] * PAIR
        dist.all_gather_object(parts, super().weights(), group=self._mesh.get_group("stage"))
        return {name: weight for part in parts for name, weight in part.items()}
