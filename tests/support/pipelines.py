"""A model in two pipeline stages, each over one or two ranks; the functions here run inside ranks."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard

from superoffload import AdamW
from superoffload.host.tensors import local_of
from tests.convergence.meshes import mesh_of, parallelize
from tests.support.meshes import LAYOUTS, WIDTH, Model, Trained, options_of, run, whole, whole_model
from tests.support.rank_processes import Onward, Received, tokens_of

# Stages x what each stage's two ranks do.
WAYS = {"pp2": 2, "pp2 tied": 2, "pp2 x fsdp2": 4, "pp2 x tp2": 4, "pp2 x fsdp2 tied": 4}


def is_tied(way: str) -> bool:
    return way.endswith("tied")


def whole_of(way: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Model:
    model = whole_model(LAYOUTS["tp2"], dtype, seed)
    if is_tied(way):
        model.head.weight = model.embedding.weight
    return model


class Stage(nn.Module):
    """Half of the model, under the names that its parameters have in the whole of it."""

    def __init__(self, model: Model, *, last: bool) -> None:
        super().__init__()
        self.last = last
        self.blocks = nn.ModuleDict({str(int(last)): model.blocks[int(last)]})
        if last:
            self.norm, self.head = model.norm, model.head
        else:
            self.embedding = model.embedding

    def forward(self, x: Tensor) -> Tensor:
        if not self.last:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        out: Tensor = self.head(self.norm(x)) if self.last else x.clone()
        return out


class Pipeline:
    """Runs a stage of the model and passes activations and their gradients on."""

    def __init__(self, way: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        self.way, rank, size = way, dist.get_rank(), dist.get_world_size()
        self.width = size // 2
        self.last = rank >= self.width
        self.peer = (rank + self.width) % size
        model = whole_of(way, dtype, seed)
        if is_tied(way):  # each stage has a copy of its own, whose gradients it reduces
            model.head.weight = nn.Parameter(model.embedding.weight.detach().clone())
        self.stage = Stage(model, last=self.last)
        mesh = mesh_of(2, self.width, names=("stage", "inner"))
        if "fsdp2" in way:
            fully_shard(self.stage, mesh=mesh["inner"])
        elif "tp2" in way:
            self._cut(mesh["inner"])

    def _cut(self, mesh: Any) -> None:
        for name, layer in list(self.stage.named_modules()):
            if isinstance(layer, nn.LayerNorm):
                parallelize(layer, mesh, Replicate())
            elif isinstance(layer, (nn.Linear, nn.Embedding)):
                parallelize(layer, mesh, Shard(1) if name.endswith("down") else Shard(0))

    @property
    def part(self) -> int:
        """Which rows of the global batch this rank has."""
        return dist.get_rank() % self.width if "fsdp2" in self.way else 0

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """A tied parameter has the same name on both stages."""
        tied = {"head.weight": "embedding.weight"} if is_tied(self.way) else {}
        return [(tied.get(name, name), param) for name, param in self.stage.named_parameters()]

    def backward(self, seed: int, part: int) -> None:
        tokens = tokens_of(seed, part)
        if self.last:
            received = Received.apply(torch.zeros((), requires_grad=True), (*tokens[:, :-1].shape, WIDTH), self.peer)
            logits = self.stage(received.to(next(self.stage.parameters()).dtype))
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            dist.send(loss.detach().clone(), self.peer)
        else:
            loss = Onward.apply(self.stage(tokens[:, :-1]), self.peer)
        loss.backward()
        if is_tied(self.way):
            self._reduce_tied()

    def _reduce_tied(self) -> None:
        """Adds the gradients of both stages, in the same order on each."""
        tied: Any = dict(self.named())["embedding.weight"]
        local = local_of(tied.grad)
        both = [local.clone(), torch.empty_like(local)]
        for sends in (not self.last, self.last):
            if sends:
                dist.send(both[0], self.peer)
            else:
                dist.recv(both[1], self.peer)
        first, second = reversed(both) if self.last else both
        local.copy_(first + second)


def norm_in_double(pipeline: Pipeline) -> float:
    """Of the gradients of both stages; a tied parameter counts once."""
    squares = torch.zeros((), dtype=torch.float64)
    for name, param in pipeline.named():
        if param.grad is not None and not (pipeline.last and name == "embedding.weight"):
            squares += whole(param.grad).square().sum()
    dist.all_reduce(squares)
    return math.sqrt(float(squares) / pipeline.width)


def train(way: str, **options: Any) -> Trained:
    """Trains over all ranks."""
    pipeline, last = Pipeline(way), dist.get_rank() == dist.get_world_size() - 1
    poisoned = [param for name, param in pipeline.named() if last and name != "embedding.weight"]
    with AdamW(pipeline.named(), **options_of(pipeline.stage, options)) as optimizer:
        backward, norm = lambda step: pipeline.backward(step, pipeline.part), partial(norm_in_double, pipeline)
        return run(pipeline.named(), optimizer, backward, norm, poisoned)
