"""The mixture of experts that `verify --engine ep` trains."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.training.config import ModelConfig
from tests.convergence.mixture import PER_TOKEN, Mixture

EXPERTS = 5


@pytest.fixture
def mixture() -> Mixture:
    torch.manual_seed(0)
    return Mixture(ModelConfig(hidden=8, heads=2, kv_heads=1, mlp=12), EXPERTS).double()


def every_expert(mixture: Mixture, x: Tensor) -> Tensor:
    """The same, where each token goes through all experts, and most count nothing."""
    chances = mixture.router(x).softmax(-1)
    least = chances.topk(PER_TOKEN, dim=-1).values[..., -1:]
    total = torch.zeros_like(x)
    for expert in range(EXPERTS):
        gate, up = F.linear(x, mixture.experts.gate_up[expert]).chunk(2, dim=-1)
        made = F.linear(F.silu(gate) * up, mixture.experts.down[expert])
        chance = chances[..., expert : expert + 1]
        total = total + made * torch.where(chance >= least, chance, 0.0)
    return total


def test_each_token_goes_through_its_two_experts(mixture: Mixture) -> None:
    x = torch.randn(2, 7, 8, dtype=torch.float64, requires_grad=True)
    sparse, dense = mixture(x), every_expert(mixture, x)
    torch.testing.assert_close(sparse, dense)
    for got, wanted in zip(
        torch.autograd.grad(sparse.square().sum(), [x, *mixture.parameters()]),
        torch.autograd.grad(dense.square().sum(), [x, *mixture.parameters()]),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted)


def test_an_expert_without_a_token_has_a_gradient_of_zero(mixture: Mixture) -> None:
    x = torch.randn(1, 1, 8, dtype=torch.float64)  # one token: two of the five experts
    mixture(x).sum().backward()
    grad = mixture.experts.down.grad
    assert grad is not None
    assert [bool(one.any()) for one in grad].count(True) == PER_TOKEN
