"""Puts a mixture of experts in the place of each feed-forward layer of the transformer.

A router sends every token to two of the experts, and nothing balances them: some get no token in a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.training.config import ModelConfig
from benchmarks.training.model import Linear, Transformer
from superoffload.host.tensors import is_dtensor

EXPERTS = 8
PER_TOKEN = 2  # experts that each token goes to

Compute = Callable[[Tensor, Tensor], Tensor]  # of tokens, and of the expert that each goes to


class Experts(nn.Module):
    """Holds as many SwiGLU layers as there are experts, or this rank's part of them. ``exchange`` takes each token to
    the rank that has its expert, and back; None where one rank has all of them."""

    exchange: Any = None

    def __init__(self, config: ModelConfig, experts: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(0.02 * torch.randn(experts, 2 * config.mlp, config.hidden))
        self.down = nn.Parameter(0.02 * torch.randn(experts, config.hidden, config.mlp))

    def forward(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        """``chosen`` ascends."""
        gate_up, down = (self._mean_over_ranks(one) for one in (self.gate_up, self.down))

        def compute(tokens: Tensor, chosen: Tensor) -> Tensor:
            made = torch.zeros_like(tokens)
            for expert, (widening, narrowing) in enumerate(zip(gate_up, down, strict=True)):
                # Also without a token: its gradient is zero then, and not missing on this rank.
                mine = (chosen == expert).nonzero().flatten()
                gate, up = F.linear(tokens[mine], widening.to(tokens.dtype)).chunk(2, dim=-1)
                made = made.index_copy(0, mine, F.linear(F.silu(gate) * up, narrowing.to(tokens.dtype)))
            return made

        made: Tensor = compute(tokens, chosen) if self.exchange is None else self.exchange.run(tokens, chosen, compute)
        return made

    def _mean_over_ranks(self, weight: Tensor) -> Tensor:
        """Returns the local experts. Tokens of several ranks add up in their gradients, which are to be of the mean of
        these ranks' losses."""
        local: Tensor = weight.to_local() if is_dtensor(weight) else weight
        if self.exchange is not None and local.requires_grad:
            local = local.view_as(local)
            local.register_hook(lambda grad: grad / self.exchange.ranks)
        return local


class Mixture(nn.Module):
    """Adds up what two experts make of each token, weighted by the router."""

    def __init__(self, config: ModelConfig, experts: int) -> None:
        super().__init__()
        self.router = Linear(config.hidden, experts)
        nn.init.normal_(self.router.weight, std=0.02)
        self.experts = Experts(config, experts)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(dim=-1).topk(PER_TOKEN, dim=-1)
        ascending = chosen.flatten().argsort(stable=True)
        of = ascending // PER_TOKEN
        made = self.experts(tokens[of], chosen.flatten()[ascending])
        weighted = made * weights.flatten()[ascending].unsqueeze(-1)
        return torch.zeros_like(tokens).index_add(0, of, weighted).view_as(x)


def put_experts(model: Transformer, experts: int, seed: int) -> None:
    """Replaces the feed-forward layers of ``model``; weights are drawn from ``seed`` in fp32 and rounded."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for block in model.blocks:
            mixture = Mixture(model.config, experts)
            block.register_module("mlp", mixture.to(model.head.weight.dtype))


class AllToAll:
    """Takes each token to the rank that has its expert, and what becomes of it back. Each of the ranks in ``group`` has
    ``each`` experts."""

    def __init__(self, group: Any, each: int) -> None:
        self.ranks, self._group, self._each = dist.get_world_size(group), group, each

    def run(self, tokens: Tensor, chosen: Tensor, compute: Compute) -> Tensor:
        away = torch.bincount(chosen // self._each, minlength=self.ranks)
        here = torch.empty_like(away)
        dist.all_to_all_single(here, away, group=self._group)
        counts = away.tolist(), here.tolist()
        arrived = _Moved.apply(tokens, *counts, self._group)
        made = compute(arrived, _moved(chosen % self._each, *counts, self._group))
        back: Tensor = _Moved.apply(made, *reversed(counts), self._group)
        return back.clone()  # fully_shard warns of what might be a view


class _Moved(torch.autograd.Function):
    """Sends the first ``away[0]`` rows to rank 0 of the group, and so on; their gradients come the same way back."""

    @staticmethod
    def forward(context: Any, rows: Tensor, away: list[int], here: list[int], group: Any) -> Tensor:
        context.way_back = here, away, group
        return _moved(rows, away, here, group)

    @staticmethod
    def backward(context: Any, *grads: Any) -> Any:
        return _moved(grads[0], *context.way_back), None, None, None


def _moved(rows: Tensor, away: list[int], here: list[int], group: Any) -> Tensor:
    got = rows.new_empty(sum(here), *rows.shape[1:])
    dist.all_to_all_single(got, rows.contiguous(), here, away, group=group)
    return got
