"""Ranks for tests, and what several test files run on them. Functions here run inside ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from superoffload import AdamW
from superoffload.distributed.launch import LocalRanks
from superoffload.tools.convergence.tensor_parallel import parallelize

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
_pools: dict[tuple[int, int], LocalRanks] = {}


def pool(count: int, number: int = 0) -> LocalRanks:
    """Ranks that tests share; made anew after a test that broke them. ``number``: of several groups of this size."""
    key = count, number
    if key in _pools and not all(process.is_alive() for process in _pools[key].processes):
        _pools.pop(key).close()
    if key not in _pools:
        _pools[key] = LocalRanks(count, timeout=30.0)
    return _pools[key]


def close_pools() -> None:
    for ranks in _pools.values():
        ranks.close()
    _pools.clear()


def side_by_side(count: int, function: Callable[..., Any], *calls: tuple[Any, ...]) -> list[list[Any]]:
    """Every call on ranks of its own, at the same time: ranks wait for each other half of it. Values, call by call."""
    groups = [pool(count, number) for number in range(len(calls))]
    for group, args in zip(groups, calls, strict=True):
        group.start(function, *args)
    outcomes = [group.collect(250.0) for group in groups]
    errors = [outcome.error for of_group in outcomes for outcome in of_group if outcome.error]
    assert not errors, "\n".join(errors)
    return [[outcome.value for outcome in of_group] for of_group in outcomes]


def on_ranks(count: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    return pool(count).run(function, *args, limit=200.0)


_tensor_parallel = 1  # in a rank: how many ranks share each matrix of a model that shard() gets


def on_mesh(count: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """``on_ranks``, with tensor parallelism: two ranks in the place of each."""
    return on_ranks(2 * count, _on_mesh, function, *args)


def _on_mesh(function: Callable[..., Any], *args: Any) -> Any:
    global _tensor_parallel
    _tensor_parallel = 2
    try:
        return function(*args)
    finally:
        _tensor_parallel = 1


def data_rank() -> int:
    """Which rows of the global batch this rank has: those that share matrices have the same ones."""
    return dist.get_rank() // _tensor_parallel


class Net(nn.Module):
    """Sizes that do not divide evenly among ranks; a norm; a frozen layer; optionally tied ends."""

    def __init__(self, width: int = 13, layers: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(29, width)
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


def net(dtype: torch.dtype = torch.bfloat16, seed: int = 0, **options: Any) -> Net:
    torch.manual_seed(seed)
    if _tensor_parallel > 1:
        options.setdefault("width", 12)  # torch cannot compute with hidden sizes that do not divide evenly
    return Net(**options).to(dtype)


def tokens_of(step: int, rank: int, rows: int = 2) -> Tensor:
    """Of the global batch of a step, the rows of one rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 29, (rows, 9), generator=generator)


def shard(model: Net, mesh: DeviceMesh, policy: Any = None, **options: Any) -> Net:
    """fully_shard on every layer and on the whole; on a mesh with tensor parallelism that comes first."""
    if "tensor" in (mesh.mesh_dim_names or ()):
        _cut(model, mesh["tensor"])
        mesh = mesh[tuple(name for name in mesh.mesh_dim_names or () if name != "tensor")]
    if policy is not None:
        options["mp_policy"] = policy
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def _cut(model: Net, mesh: DeviceMesh) -> None:
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


_meshes: weakref.WeakKeyDictionary[Any, dict[Any, DeviceMesh]] = weakref.WeakKeyDictionary()


def mesh_of(*sizes: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """A mesh, made once per process group: each makes groups whose threads poll as long as the process lives."""
    known = _meshes.setdefault(dist.group.WORLD, {})
    if (sizes, names) not in known:
        known[sizes, names] = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    return known[sizes, names]


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


def loss_of(model: Any, seed: int) -> Any:
    logits = model(tokens_of(seed, data_rank())[:, :-1])
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens_of(seed, data_rank())[:, 1:].flatten())
