"""What tests of ``delivery="on_demand"`` share: an odd model, loops over it, and both deliveries compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from superoffload import AdamW
from tests.support.adamw_training import check_counters, weights

STEPS = 6


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.gates = nn.ParameterList([nn.Parameter(torch.ones(width)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        attended: Tensor = self.attention(x, x, x, need_weights=False)[0]
        summed: Tensor = x + self.gates[0] * self.norm(attended) + self.gates[1] * x
        return summed


class Odd(nn.Module):
    """Ends that are tied, a list of parameters, attention that reads its child, a layer that half of the steps use."""

    def __init__(self, width: int = 8, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.sometimes = nn.Linear(width, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.head = nn.Linear(width, 13, bias=False)
        self.head.weight = self.embedding.weight
        self.used = True
        self.checkpointing = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        if self.used:
            x = x + self.sometimes(x)
        logits: Tensor = self.head(x + self.frozen(x))
        return logits


def odd(dtype: torch.dtype = torch.float32, blocks: int = 3) -> Odd:
    torch.manual_seed(0)
    return Odd(blocks=blocks).to(dtype)


def loss_of(model: nn.Module, seed: int) -> Tensor:
    tokens = torch.randint(0, 13, (2, 6), generator=torch.Generator().manual_seed(seed))
    return nn.functional.cross_entropy(model(tokens)[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


@contextmanager
def made(model: nn.Module, delivery: str, **options: Any) -> Iterator[AdamW]:
    defaults: dict[str, Any] = {"lr": 3e-3, "threads": 2, "bucket_numel": 1024, "speculation": "always"}
    defaults["max_grad_norm"] = 1.0
    optimizer = AdamW(
        [p for p in model.parameters() if p.requires_grad], delivery=delivery, module=model, **{**defaults, **options}
    )
    with optimizer:
        yield optimizer


Loop = Callable[[Any, AdamW, list[Any]], None]


def compare(loop: Loop, make: Callable[[], nn.Module] = odd, **options: Any) -> AdamW:
    """The same loop with both deliveries: what it has seen, and the state at its end, are the same."""
    found = []
    for delivery in ("eager", "on_demand"):
        model, seen = make(), list[Any]()
        with made(model, delivery, **options) as optimizer:
            loop(model, optimizer, seen)
            found.append((seen, optimizer.state_digests(), weights(model)))
        check_counters(optimizer)
    (seen, digests, values), (their_seen, their_digests, their_values) = found
    assert seen == their_seen
    assert digests == their_digests
    assert torch.equal(values, their_values)
    return optimizer


def plain(model: Any, optimizer: AdamW, seen: list[Any], loss_of: Callable[[Any, int], Tensor] = loss_of) -> None:
    for seed in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, seed)
        loss.backward()
        optimizer.step()
        seen.append(loss.item())


def plain_step(model: Any, optimizer: AdamW, seed: int) -> None:
    optimizer.zero_grad()
    loss_of(model, seed).backward()
    optimizer.step()


def pending(optimizer: AdamW) -> set[str]:
    return {shard.name for shard in optimizer._engine.tail.landing_shards().values()}


@contextmanager
def in_flight(**options: Any) -> Iterator[tuple[Odd, AdamW]]:
    """After a step of which nothing is delivered yet."""
    model = odd()
    with made(model, "on_demand", **options) as optimizer:
        for seed in range(2):
            plain_step(model, optimizer, seed)
        assert pending(optimizer)
        yield model, optimizer
