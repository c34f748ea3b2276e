"""A model on meshes of ranks: tensor parallel, sharded by fully_shard, with experts; functions that run on ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from superoffload import AdamW
from tests.convergence.engines import put_nan
from tests.convergence.meshes import mesh_of
from tests.support.rank_processes import loss_of as loss_of

VOCABULARY, WIDTH, HIDDEN, EXPERTS = 29, 12, 24, 6  # torch itself needs an even hidden size


class Block(nn.Module):
    """A norm and a feed-forward layer, column- and row-parallel."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


class Experts(nn.Module):
    """Every token goes to all experts, so that there is one right result: as DTensors on a mesh of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        if not isinstance(weight, DTensor):
            return torch.einsum("bsd,edf->bsf", x, weight).tanh()
        mesh = weight.device_mesh
        spread = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
        summed: Any = torch.matmul(spread.unsqueeze(0), weight.unsqueeze(1)).sum(0)
        out: Tensor = summed.redistribute(placements=[Replicate()] * mesh.ndim).to_local().tanh()
        return out


class Model(nn.Module):
    def __init__(self, *, experts: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.experts = Experts() if experts else nn.Identity()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x + self.experts(x) if isinstance(self.experts, Experts) else x))
        return logits


class Layout(NamedTuple):
    """How the model lies over the ranks: the sizes of the mesh, and what each cuts."""

    replicas: int = 1
    shards: int = 1
    tensor: int = 1
    experts: int = 1
    sequence: bool = False  # norms are parallel over the sequence

    @property
    def ranks(self) -> int:
        return self.replicas * self.shards * self.tensor * self.experts


LAYOUTS = {
    "tp2": Layout(tensor=2),
    "tp2 sp": Layout(tensor=2, sequence=True),
    "tp4": Layout(tensor=4, sequence=True),
    "fsdp2 x tp2": Layout(shards=2, tensor=2, sequence=True),
    "fsdp4 x tp1": Layout(shards=4),
    "hsdp2x1 x tp2": Layout(replicas=2, tensor=2, sequence=True),
    "ep2": Layout(experts=2),
    "fsdp2 x ep2": Layout(shards=2, experts=2),
}


def whole_model(layout: Layout, dtype: torch.dtype = torch.float32, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model(experts=layout.experts > 1).to(dtype)


def laid_out(layout: Layout, dtype: torch.dtype = torch.float32, seed: int = 0) -> Model:
    """The model over all ranks."""
    model = whole_model(layout, dtype, seed)
    if layout.experts > 1:
        return _with_experts(model, layout)
    mesh = mesh_of(layout.replicas, layout.shards, layout.tensor, names=("replicate", "shard", "tensor"))
    if layout.tensor > 1:
        _tensor_parallel(model, mesh["tensor"], sequence=layout.sequence)
    data = ("replicate", "shard") if layout.replicas > 1 else ("shard",)
    if layout.replicas * layout.shards > 1:
        _sharded(model, mesh[data])
    return model


def _tensor_parallel(model: Model, mesh: DeviceMesh, *, sequence: bool) -> None:
    inside: Any = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=inside),
        "head": ColwiseParallel(input_layouts=inside, output_layouts=Replicate()),
    }
    for i in range(len(model.blocks)):
        plan[f"blocks.{i}.up"] = ColwiseParallel(input_layouts=inside)
        plan[f"blocks.{i}.down"] = RowwiseParallel(output_layouts=inside)
        if sequence:
            plan[f"blocks.{i}.norm"] = SequenceParallel()
    if sequence:
        plan["norm"] = SequenceParallel()
    parallelize_module(model, mesh, plan)


def _sharded(model: Model, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def _with_experts(model: Model, layout: Layout) -> Model:
    """Experts on a mesh of their own, as torchtitan lays them out: sharded over it, then over the ranks that are left.
    All other parameters are sharded over all ranks."""
    mesh = mesh_of(layout.shards, layout.experts, names=("shard", "experts"))
    experts: Any = model.experts
    experts.weight = nn.Parameter(distribute_tensor(experts.weight.detach(), mesh["experts"], [Shard(0)]))
    if layout.shards > 1:
        fully_shard(experts, mesh=mesh["shard"])
        _sharded(model, mesh_of(layout.ranks))
    return model


def rows(layout: Layout, rank: int) -> int:
    """The rows of the batch that a rank has: ranks that hold parts of one replica of the model have the same ones."""
    return rank // (layout.tensor * layout.experts)


def whole(value: Any) -> Tensor:
    """A copy in fp64, gathered where it is spread."""
    tensor: Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return tensor.detach().double()


def everything(named: Iterable[tuple[str, nn.Parameter]], optimizer: AdamW) -> dict[str, Tensor]:
    """All parameters and their state, gathered, by name and kind."""
    found = {}
    for name, param in named:
        found[name] = whole(param)
        found.update({f"{key} {name}": whole(value) for key, value in optimizer.state.get(param, {}).items()})
    return found


def norm_in_double(model: nn.Module) -> float:
    return math.sqrt(sum(float(whole(p.grad).square().sum()) for p in model.parameters() if p.grad is not None))


class Trained(NamedTuple):
    """What a run leaves: the norm of every step and that in double, all state of this rank, whole masters by name."""

    norms: list[float]
    in_double: list[float]
    digests: dict[str, str]
    masters: dict[str, Tensor]
    stats: dict[str, Any]


def options_of(model: nn.Module, options: dict[str, Any]) -> dict[str, Any]:
    return {"lr": 3e-3, "threads": 1, "bucket_numel": 512, "model": model, "rank_timeout": 20.0, **options}


def train(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Trained:
    """Trains over all ranks."""
    layout = LAYOUTS[name]
    model, part = laid_out(layout, dtype), rows(layout, dist.get_rank())
    poisoned = model.parameters() if dist.get_rank() == layout.ranks - 1 else ()
    with AdamW(model.parameters(), **options_of(model, options)) as optimizer:
        backward, norm = lambda step: loss_of(model, step, part).backward(), partial(norm_in_double, model)
        return run(model.named_parameters(), optimizer, backward, norm, poisoned)


def train_alone(model: Model, parts: Sequence[int]) -> Trained:
    """The same training in one process, which has all rows."""

    def backward(step: int) -> None:
        for part in parts:
            (loss_of(model, step, part) / len(parts)).backward()

    with AdamW(model.named_parameters(), **options_of(model, {})) as optimizer:
        norm = partial(norm_in_double, model)
        return run(model.named_parameters(), optimizer, backward, norm, model.parameters())


def run(
    named: Iterable[tuple[str, nn.Parameter]], optimizer: AdamW, backward: Callable[[int], None],
    norm: Callable[[], float], poisoned: Iterable[nn.Parameter],
) -> Trained:  # fmt: skip
    """Six steps: one is clipped late, so that it is replayed, and one has a NaN in a gradient of ``poisoned``."""
    norms, in_double = [], []
    for step in range(6):
        optimizer.zero_grad()
        optimizer.max_grad_norm = 50.0
        backward(step)
        if step == 3:
            put_nan(poisoned)
        else:
            in_double.append(norm())
        if step == 2:  # as late as this every bucket is speculated
            optimizer.max_grad_norm = in_double[-1] / 3
        optimizer.step()
        if step != 3:
            norms.append(optimizer.grad_norm)
    masters = {name: whole(optimizer.state[param]["master"]) for name, param in named}
    return Trained(norms, in_double, optimizer.state_digests(), masters, optimizer.stats())
