"""Experts without a token in a step, on every layout: what torch.optim.AdamW does with their gradients, None or zeros,
in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from superoffload import AdamW
from tests.support.rank_processes import flat_mesh, mesh_of, on_ranks, whole

EXPERTS, ROWS, COLUMNS = 4, 6, 5
TOKENS = [(0, 1, 2, 3), (0, 2), (1,), (0, 1, 3), (2,), ()]  # the experts that have some, step by step
HYPER: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.9), "weight_decay": 0.3}


def weights() -> Tensor:
    return torch.randn(EXPERTS, ROWS, COLUMNS, generator=torch.Generator().manual_seed(1))


def inputs(step: int) -> Tensor:
    """The gradient of each expert's output by its weights, in a step."""
    return torch.randn(EXPERTS, ROWS, COLUMNS, generator=torch.Generator().manual_seed(100 + step))


class Trained(NamedTuple):
    """Experts by number: weights, and how many steps they took. ``speculated``: buckets."""

    weights: dict[int, Tensor]
    steps: dict[int, int]
    digests: dict[str, str]
    speculated: int = 0


class Expert(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


class Experts(nn.Module):
    """Each expert has a parameter of its own; those without a token are not called. All tokens pass ``router``."""

    def __init__(self, numbers: list[int]) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.ones(2))
        self.experts = nn.ModuleDict({str(number): Expert(weights()[number]) for number in numbers})

    def forward(self, step: int) -> Tensor:
        mine = [number for number in TOKENS[step] if str(number) in self.experts]
        return sum((self.experts[str(number)](inputs(step)[number]) for number in mine), self.router.sum())


def torchs(zeros: bool, share: float) -> Trained:
    """One process, torch.optim.AdamW, a parameter per expert. ``share``: what the gradients are multiplied by."""
    params = [nn.Parameter(one.clone()) for one in weights()]
    optimizer = torch.optim.AdamW(params, foreach=False, **HYPER)
    for step, active in enumerate(TOKENS):
        for number, param in enumerate(params):
            idle = torch.zeros_like(param) if zeros else None
            param.grad = share * inputs(step)[number] if number in active else idle
        optimizer.step()
    steps = {number: int(optimizer.state[param]["step"]) for number, param in enumerate(params)}
    return Trained({number: param.detach() for number, param in enumerate(params)}, steps, {})


# ---- in a rank ------------------------------------------------------------------------------------------------------


def one_each(layout: str, speculation: str) -> Trained:
    """A parameter per expert: all on this rank, sharded by FSDP2, under DDP, or on one rank each."""
    rank, apart, by_ddp = dist.get_rank(), layout == "on their ranks", layout.startswith("ddp")
    numbers = [number for number in range(EXPERTS) if not apart or number % dist.get_world_size() == rank]
    model: Any = Experts(numbers)
    if layout == "fsdp2":
        for part in (*model.experts.values(), model):
            fully_shard(part, mesh=flat_mesh())
    called = DistributedDataParallel(model, find_unused_parameters=True) if by_ddp else model
    named = [(name, param) for name, param in model.named_parameters() if name != "router" or by_ddp]
    options: dict[str, Any] = {} if apart else {"model": called}
    with AdamW(named, speculation=speculation, threads=1, bucket_numel=64, **options, **HYPER) as optimizer:
        for step in range(len(TOKENS)):
            optimizer.zero_grad()
            called(-1 if by_ddp and rank else step).backward()  # -1: none has a token
            optimizer.step()
        params = {number: model.experts[str(number)].weight for number in numbers}
        steps = {number: int(optimizer.state[param]["step"]) for number, param in params.items()}
        found = {number: whole(param) for number, param in params.items()}
        return Trained(found, steps, optimizer.state_digests(), int(optimizer.stats()["buckets_speculated"]))


def one_big(_: str, speculation: str) -> Trained:
    """One parameter with all experts, over ranks: idle experts have zeros in its gradient."""
    mesh, placements = mesh_of(2, 2, names=("experts", "rows")), [Shard(0), Shard(1)]
    param: Any = nn.Parameter(distribute_tensor(weights(), mesh, placements))
    with AdamW([("experts", param)], speculation=speculation, threads=1, bucket_numel=64, **HYPER) as optimizer:
        for step, active in enumerate(TOKENS):
            optimizer.zero_grad()
            gradient = inputs(step) * torch.tensor([float(n in active) for n in range(EXPERTS)]).view(-1, 1, 1)
            (param.to_local() * distribute_tensor(gradient, mesh, placements).to_local()).sum().backward()
            optimizer.step()
        steps = dict.fromkeys(range(EXPERTS), int(optimizer.state[param]["step"]))
        found = dict(enumerate(whole(param)))
        return Trained(found, steps, optimizer.state_digests(), int(optimizer.stats()["buckets_speculated"]))


def both(train: Callable[..., Trained], layout: str) -> list[Trained]:
    return [train(layout, mode) for mode in ("always", "never")]


def check(results: list[list[Trained]], zeros: bool, share: float = 1.0) -> None:
    expected, seen = torchs(zeros, share), set()
    for speculative, synchronous in results:
        assert speculative.digests == synchronous.digests
        assert synchronous.speculated == 0
        for number, weight in speculative.weights.items():
            torch.testing.assert_close(weight, expected.weights[number], rtol=1e-6, atol=1e-7)
            assert speculative.steps[number] == expected.steps[number], number
            seen.add(number)
    assert seen == set(range(EXPERTS))
    assert any(speculative.speculated for speculative, _ in results)


@pytest.mark.parametrize(("layout", "count"), [("fsdp2", 4), ("ddp", 2), ("on their ranks", 2)])
def test_experts_without_a_gradient_are_left_alone(layout: str, count: int) -> None:
    share = 1 / count if layout == "ddp" else 1.0
    check(on_ranks(count, both, one_each, layout), zeros=False, share=share)


def test_experts_with_zeros_decay() -> None:
    check(on_ranks(4, both, one_big, "ep x rows"), zeros=True)
