"""Ranks for tests, and what several test files run on them. Functions here run inside ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from superoffload import AdamW
from tests.convergence.local_ranks import LocalRanks
from tests.convergence.meshes import mesh_of as mesh_of
from tests.convergence.meshes import parallelize

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
_pools: dict[tuple[int, str], LocalRanks] = {}


def pool(count: int, kind: str = "") -> LocalRanks:
    """Ranks that tests of a kind share; made anew after a test that broke them."""
    ranks = _pools.get((count, kind))
    if ranks is not None and not all(process.is_alive() for process in ranks.processes):
        _pools.pop((count, kind)).close()
    return _pools.get((count, kind)) or _pools.setdefault((count, kind), LocalRanks(count, timeout=30.0))


def close_all() -> None:
    for ranks in _pools.values():
        ranks.close()
    _pools.clear()


def on_ranks(count: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    return pool(count).run(function, *args, limit=200.0)


_tensor_parallel = 1  # in a rank: how many ranks share each matrix of a model that shard() gets
_stages = 1  # in a rank: how many ranks have a part each of a model that shard() gets


def on_mesh(count: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """``on_ranks``, with tensor parallelism: two ranks in the place of each."""
    return on_ranks(2 * count, _laid_out, 2, 1, function, *args)


def on_stages(count: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """``on_ranks``, as pipeline stages: each rank has a model of its own, and the second reads what the first makes."""
    assert count == 2
    return on_ranks(2, _laid_out, 1, 2, function, *args)


RANKS = {"fsdp2": on_ranks, "mesh": on_mesh, "stages": on_stages}


def layouts(*names: str) -> pytest.MarkDecorator:
    """Runs a test once per layout (default: all), with its ``ranks``."""
    return pytest.mark.parametrize("ranks", [pytest.param(RANKS[name], id=name) for name in names or RANKS])


def _laid_out(tensor_parallel: int, stages: int, function: Callable[..., Any], *args: Any) -> Any:
    global _tensor_parallel, _stages
    _tensor_parallel, _stages = tensor_parallel, stages
    try:
        return function(*args)
    finally:
        _tensor_parallel = _stages = 1


def data_rank() -> int:
    """Which rows of the global batch this rank has: those that share matrices, and stages, have the same ones."""
    return dist.get_rank() // (_tensor_parallel * _stages)


class Embedding(nn.Embedding):
    """Of tokens, or of logits that the stage before has made."""

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.weight.dtype) @ self.weight if x.is_floating_point() else super().forward(x)


class Net(nn.Module):
    """Sizes that do not divide evenly among ranks; a norm; a frozen layer; optionally tied ends."""

    def __init__(self, width: int = 0, layers: int = 2, tied: bool = False) -> None:
        super().__init__()
        # torch cannot compute with hidden sizes that do not divide evenly over a mesh
        width = width or (12 if _tensor_parallel > 1 else 13)
        self.embedding = Embedding(29, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width), nn.LayerNorm(width))
            for _ in range(layers)
        )
        self.frozen = nn.Linear(width, width, bias=False).requires_grad_(False)
        self.head = nn.Linear(width, 29, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        logits: Tensor = self.head(x + 0.1 * self.frozen(x)).clone()  # FSDP2 warns of views
        return logits

    def loss(self, tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


class Stage(nn.Module):
    """One of two pipeline stages, of which each has a Net: it passes on logits, and gets their gradients back."""

    def __init__(self, part: Net) -> None:
        super().__init__()
        self.part = [part]  # in a list: it is registered under another name on each rank
        self.add_module(f"stage{dist.get_rank()}", part)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.part[0], name) if name in ("layers", "head", "embedding") else super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.part[0](x)
        return logits

    def loss(self, tokens: Tensor) -> Tensor:
        """Of the last stage; its value is on both."""
        if dist.get_rank() == 0:
            passed_on: Tensor = Onward.apply(self(tokens[:, :-1]), 1)
            return passed_on
        received = Received.apply(torch.zeros((), requires_grad=True), (*tokens[:, :-1].shape, 29), 0)
        loss = nn.functional.cross_entropy(self(received).float().flatten(0, 1), tokens[:, 1:].flatten())
        dist.send(loss.detach().clone(), 0)
        return loss


class Onward(torch.autograd.Function):
    """Sends activations to the rank with the second stage, which answers with the loss; backward waits for their
    gradients."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, peer: int) -> Tensor:
        ctx.like, ctx.peer, loss = made.detach(), peer, torch.zeros(())
        dist.send(made.detach().float().contiguous(), peer)
        dist.recv(loss, peer)
        return loss

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        gradient = torch.empty_like(ctx.like, dtype=torch.float32)
        dist.recv(gradient, ctx.peer)
        return gradient.to(ctx.like.dtype), None


class Received(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor, shape: tuple[int, ...], peer: int) -> Tensor:
        ctx.peer, made = peer, torch.empty(shape)
        dist.recv(made, peer)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        dist.send(gradient.float().contiguous(), ctx.peer)
        return None, None, None


def net(dtype: torch.dtype = torch.bfloat16, seed: int = 0, **options: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**options).to(dtype)


def tokens_of(step: int, rank: int, rows: int = 2) -> Tensor:
    """Of the global batch of a step, the rows of one rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 29, (rows, 9), generator=generator)


def shard(model: Net, mesh: DeviceMesh, policy: Any = None, **options: Any) -> Net:
    """fully_shard on every layer and on the whole; on a mesh with tensor parallelism that comes first. A pipeline stage
    stays whole."""
    if _stages > 1:
        return cast(Net, Stage(model))
    if "tensor" in (mesh.mesh_dim_names or ()):
        cut(model, mesh["tensor"])
        mesh = mesh[tuple(name for name in mesh.mesh_dim_names or () if name != "tensor")]
    if policy is not None:
        options["mp_policy"] = policy
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def cut(model: Net, mesh: DeviceMesh) -> None:
    tied = model.head.weight is model.embedding.weight
    for layer in model.layers:
        inner, outer = (one for one in layer.modules() if isinstance(one, nn.Linear))
        parallelize(inner, mesh, Shard(0))
        parallelize(outer, mesh, Shard(1))
        for one in layer.modules():
            if isinstance(one, nn.LayerNorm):
                parallelize(one, mesh, Replicate())
    parallelize(model.embedding, mesh, Shard(0))
    parallelize(model.frozen, mesh, Replicate())
    parallelize(model.head, mesh, Shard(0))
    if tied:
        model.head.weight = model.embedding.weight


def whole(value: Any) -> Tensor:
    """A copy, gathered where it is spread."""
    tensor: Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return tensor.detach().clone()


def wholes_of(model: nn.Module) -> list[Tensor]:
    """Copies of all parameters, gathered."""
    return [whole(param) for param in model.parameters()]


def flat_mesh() -> DeviceMesh:
    size = torch.distributed.get_world_size()
    if _tensor_parallel > 1:
        return mesh_of(size // _tensor_parallel, _tensor_parallel, names=("data", "tensor"))
    return mesh_of(size)


def replica_mesh() -> DeviceMesh:
    """Two replicas of a model that is sharded over half of the ranks."""
    size = torch.distributed.get_world_size()
    return mesh_of(2, size // 2, names=("replicate", "shard"))


@contextmanager
def optimizer_of(model: nn.Module, **options: Any) -> Iterator[AdamW]:
    defaults: dict[str, Any] = {"lr": 3e-3, "max_grad_norm": 1.0, "threads": 1, "bucket_numel": 1024, "model": model}
    defaults["rank_timeout"] = 20.0
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], **{**defaults, **options})
    try:
        yield optimizer
    finally:
        optimizer.close()


def error_of(function: Callable[[], Any]) -> str:
    """The text of the error that ``function`` must raise."""
    with pytest.raises(Exception) as caught:
        function()
    return f"{type(caught.value).__name__}: {caught.value}"


def loss_of(model: Any, seed: int, part: int | None = None) -> Tensor:
    """Of the rows of this rank, or of a part."""
    tokens = tokens_of(seed, data_rank() if part is None else part)
    logits = model(tokens[:, :-1])
    gathered = logits.full_tensor() if isinstance(logits, DTensor) else logits
    return nn.functional.cross_entropy(gathered.float().flatten(0, 1), tokens[:, 1:].flatten())
