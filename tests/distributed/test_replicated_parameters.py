"""Plain parameters on several ranks: DDP with our communication hook, gradients reduced by hand, state spread out."""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from superoffload import AdamW
from superoffload.errors import ArgumentError
from tests.support.rank_processes import Net, error_of, loss_of, net, on_ranks, optimizer_of

STEPS = 6
CLIPPED, POISONED, EDITED, TWICE = 1, 2, 3, 4


def reduce(model: nn.Module) -> None:
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad.div_(dist.get_world_size())


def train(model: Any, optimizer: AdamW, *, by_hand: bool) -> list[float]:
    """A late clip, a NaN on one rank, edited gradients, two backwards; averages over ranks as DDP has them."""
    net_of = model.module if isinstance(model, DistributedDataParallel) else model
    losses = []
    for step in range(STEPS):
        optimizer.max_grad_norm = 50.0
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        if step == TWICE:
            loss_of(model, step + 100).backward()
        if by_hand:
            reduce(net_of)
        losses.append(loss.item())
        if step == POISONED and dist.get_rank() == 1:
            net_of.head.weight.grad[-1, -1] = math.nan
        if step == EDITED:
            net_of.head.weight.grad.mul_(0.5)
        if step == CLIPPED:
            optimizer.max_grad_norm = 0.05
        optimizer.step()
    return losses


class Found(NamedTuple):
    losses: list[float]
    weights: list[torch.Tensor]
    state: list[torch.Tensor]
    stats: dict[str, Any]
    elements: int
    names: list[str]


def run(kind: str, replicated: str, dtype: torch.dtype, view: bool, master: str) -> list[Found]:
    """Speculating and not."""
    found = []
    for mode in ("always", "never"):
        inner = net(dtype)
        model: Any = inner
        if kind == "ddp":
            model = DistributedDataParallel(inner, bucket_cap_mb=0.005, gradient_as_bucket_view=view)
        kinds = {"speculation": mode, "replicated": replicated, "state_dtype": "bf16", "master_dtype": master}
        with optimizer_of(model, **kinds) as optimizer:
            losses = train(model, optimizer, by_hand=kind == "hand")
            values = optimizer.state_dict()["state"].values()
            state = [one[name].clone() for one in values for name in ("master", "exp_avg", "exp_avg_sq")]
            weights, shards = [p.detach().clone() for p in inner.parameters()], optimizer._engine.shards
            numel = sum(shard.numel for shard in shards)
            found.append(Found(losses, weights, state, optimizer.stats(), numel, [shard.name for shard in shards]))
    return found


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("kind", "dtype", "master"), [("ddp", torch.float32, "fp32"), ("hand", torch.bfloat16, "split")]
)
def test_replicated_and_spread_state_have_the_same_bits(kind: str, dtype: torch.dtype, master: str) -> None:
    view = dtype is torch.float32
    whole = on_ranks(2, run, kind, "replicate", dtype, view, master)
    spread = on_ranks(2, run, kind, "shard", dtype, view, master)
    trained = sum(p.numel() for p in net(dtype).parameters() if p.requires_grad)
    assert [always.elements for always, _ in whole] == [trained] * 2
    assert sum(always.elements for always, _ in spread) == trained
    for results in (whole, spread):
        for always, never in results:
            assert always.losses == never.losses and len(set(always.losses)) == STEPS
            assert same(always.weights, never.weights) and same(always.state, never.state)
            assert same(always.weights, results[0][0].weights) and same(always.state, results[0][0].state)
            assert always.stats["skipped_steps"] == 1 and always.stats["steps"] == STEPS - 1
            # Without knowing when a gradient is reduced, nothing may be stepped before step().
            assert (always.stats["buckets_speculated"] > 0) == (kind == "ddp")
            assert {"head.weight", "layers.0.0.bias"} <= set(always.names)
    # The norm is summed in other pieces, so a clipped step may differ in a last bit; all else is the same arithmetic.
    for one, other in zip(whole[0][0].weights, spread[0][0].weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5 if dtype is torch.float32 else 1e-2, atol=1e-6)


def unreduced(replicated: str) -> str:
    model = net(torch.float32)
    with optimizer_of(model, replicated=replicated) as optimizer:
        loss_of(model, 0).backward()
        before = [p.detach().clone() for p in model.parameters()]
        error = error_of(optimizer.step)
        if replicated == "replicate":  # where state is spread, the full check finds it after the step
            assert same(before, [p.detach() for p in model.parameters()])
        return error


@pytest.mark.parametrize("replicated", ["replicate", "shard"])
def test_gradients_that_nobody_reduced_are_refused_on_every_rank(replicated: str) -> None:
    for message in on_ranks(2, unreduced, replicated):
        assert message.startswith("RankError") and "rank 1: embedding.weight: its gradient differs" in message
        assert "must be reduced over the ranks before step()" in message


def whose_norms() -> list[str]:
    """What is said: of three ranks, two are a group; then all; and a group whose threshold comes later."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2], [0, 1, 2])]
    said = []
    mine = groups[dist.get_rank() // 2]
    for group, norm in ((mine, 1.0), (groups[2], 1.0), (mine, None)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            options: dict[str, Any] = {"threads": 1, "rank_timeout": 20.0, "process_group": group}
            with AdamW([nn.Parameter(torch.ones(4))], max_grad_norm=norm, **options) as optimizer:
                optimizer.max_grad_norm = 2.0
        said.append("; ".join(str(one.message) for one in caught if "max_grad_norm" in str(one.message)))
    # Only two of three ranks have made a group for the optimizer; that does not count among the program's.
    dist.barrier(dist.new_group([0, 1, 2], use_local_synchronization=True))
    return said


def test_clipping_by_the_norm_of_some_ranks_is_said_once() -> None:
    first, second, third = on_ranks(3, whose_norms)
    words = "superoffload: max_grad_norm=1 clips by the norm of the gradients on rank 0, 1 alone (2 of 3)"
    assert first[0].startswith(words) and "superoffload: max_grad_norm=2 " not in first[0]
    assert "rank 2 alone (1 of 3)" in third[0]
    assert second[0] == "", "the group's first rank has said it"
    assert first[1] == second[1] == third[1] == ""
    assert first[2].startswith("superoffload: max_grad_norm=2 ")


def two_hooks() -> str:
    model = DistributedDataParallel(net(torch.float32))
    model.register_comm_hook(None, allreduce_hook)
    return error_of(lambda: AdamW(model.parameters(), model=model))


def test_a_model_with_another_communication_hook_is_refused() -> None:
    assert all("has a communication hook already" in error for error in on_ranks(2, two_hooks))


def test_bad_arguments() -> None:
    given: list[dict[str, Any]] = [
        {"replicated": "copied"}, {"rank_check": {"full": 0}}, {"rank_check": "some"}, {"rank_timeout": 0.0}
    ]  # fmt: skip
    for options in given:
        with pytest.raises(ArgumentError, match=next(iter(options))):
            AdamW(Net().parameters(), **options)
