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
from superoffload.engine.bucket import Bucket
from superoffload.engine.engine import Engine
from superoffload.engine.passed import Passed
from tests.support.compatibility import compat
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
    pass_by, reopen = Engine.pass_by, Engine._reopen

    def passing(engine: Engine, bucket: Bucket) -> None:
        before = len(engine._incomplete)
        pass_by(engine, bucket)
        counts["passed"] += len(engine._incomplete) - before

    def reopening(engine: Engine, arrivals: Any) -> None:
        before = len(engine._incomplete)
        reopen(engine, arrivals)
        counts["reopened"] += before - len(engine._incomplete)

    with mock.patch.object(Engine, "pass_by", passing), mock.patch.object(Engine, "_reopen", reopening):
        yield counts


def backward(model: Chain, chance: random.Random, idle: float, scale: float = 1.0) -> None:
    used = [number for number in range(COUNT) if chance.random() >= idle] or [0]
    if chance.random() < 0.3:  # another order, which backward follows
        late = chance.sample(used, min(3, len(used)))
        used = late + [number for number in used if number not in late]
    (scale * model(used, torch.linspace(-1, 1, NUMEL))).backward()


def after_backward(model: Chain, optimizer: AdamW, chance: random.Random, idle: float) -> None:
    """What users do before step()."""
    params = [param for param in model.links if param.grad is not None]
    what = chance.choice(["nothing", "nothing", "edit", "remove", "add", "again", "look", "NaN", "lr"])
    grad: Any = chance.choice(params).grad
    with torch.no_grad():
        if what == "edit":
            grad.mul_(0.5)
        elif what == "remove":
            chance.choice(params).grad = None
        elif what == "add":  # also to parameters that had none
            param = chance.choice(list(model.links))
            param.grad = torch.ones_like(param)
        elif what == "look":
            optimizer.state_digests()
        elif what == "NaN":
            grad[3] = float("nan")
        elif what == "lr":
            optimizer.param_groups[0]["lr"] *= 0.9
    if what == "again":
        backward(model, chance, idle)


def train(seed: int, dtype: torch.dtype, speculation: str, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    chance = random.Random(seed)
    model, found = Chain(dtype), []
    idle, clips = chance.choice([0.1, 0.3, 0.8]), chance.choice([None, 0.05, 10.0])
    with AdamW(
        model.parameters(), lr=1e-2, weight_decay=0.1, max_grad_norm=clips, speculation=speculation,
        threads=chance.choice([1, 2]), bucket_numel=1024, **options,
    ) as optimizer:  # fmt: skip
        for _ in range(STEPS):
            optimizer.zero_grad()
            if chance.random() < 0.2:
                with optimizer.accumulate():
                    backward(model, chance, idle)
            backward(model, chance, idle)
            after_backward(model, optimizer, chance, idle)
            optimizer.step()
            steps = [int(optimizer.state[param]["step"]) if param in optimizer.state else 0 for param in model.links]
            found.append((optimizer.state_digests(), steps, optimizer.grad_norm))
        return found, optimizer.stats()


@compat("a step with some or no gradients", "single", "stand_in", note="slower where gradients are brought back")
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


def test_where_backward_is() -> None:
    buckets = [mock.Mock(number=number, waits_for_all=False) for number in range(12)]
    passed = Passed()
    assert passed.begins(buckets[0], buckets[:1]) == []
    assert passed.begins(buckets[11], [buckets[0], buckets[11]]) == [], "one gradient, far away, says nothing"
    assert passed.begins(buckets[1], [buckets[0], buckets[11], buckets[1]]) == [], "it is just in the next one"
    assert passed.begins(buckets[2], [buckets[0], buckets[11], buckets[2]]) == [buckets[0]]
    buckets[1].waits_for_all = True
    waiting = [buckets[1], buckets[2], buckets[5], buckets[11]]
    assert passed.begins(buckets[5], waiting) == [], "only bucket 1 is before bucket 2, and it waits"
    assert passed.begins(buckets[6], waiting) == [buckets[2]]
    passed.end_step()
    assert passed.begins(buckets[7], waiting) == [], "another step"


def test_a_bucket_that_was_passed_too_early_waits_from_then_on() -> None:
    model = Chain(torch.float32)
    with (
        AdamW(model.parameters(), speculation="always", threads=1, bucket_numel=1024) as optimizer,
        counted() as counts,
    ):
        found = []
        for used in [list(range(COUNT)), *[[COUNT - 1, *range(COUNT - 1)]] * 3]:  # the last one's gradient comes last
            optimizer.zero_grad()
            model(used, torch.linspace(-1, 1, NUMEL)).backward()
            optimizer.step()
            found.append(counts["reopened"])
    assert found == [0, 1, 1, 1]


@pytest.mark.parametrize("first", [list(range(0, COUNT, 2)), list(range(40))])
def test_those_without_a_gradient_in_the_first_step_stay_beside_their_like(first: list[int]) -> None:
    """So their buckets fill as backward goes on, in a later step that uses them all."""
    model, x = Chain(torch.float32), torch.linspace(-1, 1, NUMEL)
    with AdamW(model.parameters(), speculation="always", bucket_numel=8 * NUMEL) as optimizer:
        for used in (first, list(range(COUNT)), list(range(COUNT))):
            model(used, x).backward()
            optimizer.step()
            optimizer.zero_grad()
        laid_out = [piece.shard.index for bucket in optimizer._engine.buckets for piece in bucket.pieces]
        assert laid_out == list(reversed(range(COUNT)))
        stats = optimizer.stats()
    buckets = len(optimizer._engine.buckets)
    assert stats["buckets_undone"] == 0 and stats["buckets_speculated"] >= 2 * buckets
