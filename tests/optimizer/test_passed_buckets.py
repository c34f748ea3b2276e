"""Parameters without a gradient in a step, as experts without a token have none: backward passes their buckets, which
are stepped with the gradients that they have. A gradient that comes late undoes that."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW
from superoffload.engine.engine import Engine
from tests.support.over_stand_in import only_over_stand_in

COUNT, NUMEL = 96, 100  # parameters; eight of them make a bucket
STEPS, SEEDS = 8, 4


class Chain(nn.Module):
    """Calls some of its parameters one after the other, so that their gradients come in the opposite order."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.links = nn.ParameterList(nn.Parameter(torch.randn(NUMEL, dtype=dtype)) for _ in range(COUNT))

    def forward(self, used: list[int], x: Tensor) -> Tensor:
        for number in used:
            x = x + 0.1 * torch.tanh(self.links[number].float() + x)
        return x.square().mean()


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """How many buckets were passed, and how many of those had to take a late gradient."""
    counts: Counter[str] = Counter()

    def counting(method: Any, name: str, sign: int) -> Any:
        def counted(engine: Engine, *args: Any) -> None:
            before = len(engine._incomplete)
            method(engine, *args)
            counts[name] += sign * (len(engine._incomplete) - before)

        return mock.patch.object(Engine, method.__name__, counted)

    with counting(Engine.pass_by, "passed", 1), counting(Engine._reopen, "reopened", -1):
        yield counts


def backward(model: Chain, chance: random.Random, idle: float) -> None:
    used = [number for number in range(COUNT) if chance.random() >= idle] or [0]
    if chance.random() < 0.3:  # another order, which backward follows
        late = chance.sample(used, min(3, len(used)))
        used = late + [number for number in used if number not in late]
    model(used, torch.linspace(-1, 1, NUMEL)).backward()


@torch.no_grad()
def edit(model: Chain, chance: random.Random) -> None:
    """What users do before step()."""
    params = [param for param in model.links if param.grad is not None]
    what = chance.choice(["nothing", "nothing", "nothing", "edit", "remove", "add", "NaN"])
    grad: Any = chance.choice(params).grad
    if what == "edit":
        grad.mul_(0.5)
    elif what == "remove":
        chance.choice(params).grad = None
    elif what == "add":  # also to parameters that had none
        param = chance.choice(list(model.links))
        param.grad = torch.ones_like(param)
    elif what == "NaN":
        grad[3] = float("nan")


def train(seed: int, dtype: torch.dtype, speculation: str, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    chance = random.Random(seed)
    model, found = Chain(dtype), []
    idle, clips = chance.choice([0.1, 0.3, 0.8]), chance.choice([None, 0.05, 10.0])
    options = {"max_grad_norm": clips, "threads": chance.choice([1, 2]), "bucket_numel": 1024, **options}
    with AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, speculation=speculation, **options) as optimizer:
        for _ in range(STEPS):
            optimizer.zero_grad()
            if chance.random() < 0.2:
                with optimizer.accumulate():
                    backward(model, chance, idle)
            backward(model, chance, idle)
            edit(model, chance)
            if chance.random() < 0.1:
                backward(model, chance, idle)
            optimizer.step()
            steps = [int(optimizer.state[param]["step"]) if param in optimizer.state else 0 for param in model.links]
            found.append((optimizer.state_digests(), steps, optimizer.grad_norm))
        return found, optimizer.stats()


@pytest.mark.over_stand_in(brings_back="sometimes")
@only_over_stand_in(dtype=torch.bfloat16)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_random_steps(dtype: torch.dtype) -> None:
    total: Counter[str] = Counter()
    for seed in range(SEEDS):
        options: dict[str, Any] = {"state_dtype": "bf16"} if seed % 3 == 0 else {}
        with counted() as counts:
            speculative, stats = train(seed, dtype, "always", **options)
        synchronous, _ = train(seed, dtype, "never", **options)
        for step, (one, other) in enumerate(zip(speculative, synchronous, strict=True)):
            assert repr(one) == repr(other), f"seed {seed}, step {step}"  # a norm may be NaN
        total += counts
        total["speculated"] += int(stats["buckets_speculated"])
    assert total["passed"] > 20 and total["reopened"] > 4 and total["speculated"] > 60, total
