"""fp32 gradients of bf16 parameters among ranks: FSDP2's reduction in fp32, and main_grad that its user reduces."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from superoffload import AdamW
from superoffload.integrations.fsdp2 import keep_reduced_gradients
from tests.support.adamw_training import model_of
from tests.support.fp32_gradients import add_to_main_grad, by_kernels, needs_grad_dtype, parameters_of, precise_loss
from tests.support.fsdp2_cases import STEPS, Case, build, train
from tests.support.rank_processes import (
    BF16,
    error_of,
    flat_mesh,
    net,
    on_ranks,
    optimizer_of,
    shard,
    tokens_of,
    whole,
)


def sharded(case: Case) -> dict[str, Any]:
    """In a rank: both modes, with the gradients of the last step."""
    found: dict[str, Any] = {}
    for mode in ("always", "never"):
        model = build(case)
        keep_reduced_gradients(model)
        with optimizer_of(model, speculation=mode) as optimizer:
            losses = train(model, optimizer, case, dist.get_rank(), dist.get_world_size())
            found[mode] = (optimizer.state_digests(), losses)
            found[f"{mode} stats"] = optimizer.stats()
            found["dtypes"] = {param.grad.dtype for param in model.parameters() if param.grad is not None}
            found["packed"] = {one.gradient_dtype for one in optimizer._engine.shards}
    return found


CASES = {
    "micro-batches, tied, on the meta device": (
        2, Case(dtype=torch.bfloat16, policy=BF16, micro_batches=2, tied=True, meta=True)
    ),
    "replicas": (4, Case(dtype=torch.bfloat16, policy=BF16, replicas=True)),
}  # fmt: skip


@needs_grad_dtype
@pytest.mark.parametrize("name", CASES)
def test_speculation_changes_nothing(name: str) -> None:
    count, case = CASES[name]
    for result in on_ranks(count, sharded, case):
        assert result["always"] == result["never"]
        assert result["dtypes"] == result["packed"] == {torch.float32}
        stats = result["always stats"]
        assert stats["steps"] == STEPS - 1 and stats["skipped_steps"] == 1 and stats["clipped_steps"] >= 1
        assert stats["buckets_speculated"] > 0 and stats["buckets_replayed"] > 0
        assert result["never stats"]["buckets_speculated"] == 0


def reduced_twice() -> tuple[bool, bool, list[str]]:
    """In a rank: whether gradients are the mean of the ranks' in fp32 to the bit, and two of them the sum. Also what
    models without such gradients are told."""
    rows = [tokens_of(0, rank) for rank in range(2)]
    parts = []
    for tokens in rows:
        model = net(torch.bfloat16)
        model.loss(tokens).backward()
        parts.append([p.grad.float() for p in model.parameters() if p.grad is not None])
    means = [(a + b) / 2 for a, b in zip(*parts, strict=True)]
    model = shard(net(torch.bfloat16), flat_mesh(), BF16)
    keep_reduced_gradients(model)
    once = []
    with optimizer_of(model) as optimizer:
        for times in (1, 2):
            model.loss(rows[dist.get_rank()]).backward()
            grads = [whole(p.grad) for p in model.parameters() if p.grad is not None]
            once.append(all(torch.equal(g, times * m) for g, m in zip(grads, means, strict=True)))
        optimizer.step()
    plain = shard(net(torch.bfloat16), flat_mesh())
    errors = [error_of(partial(keep_reduced_gradients, model)) for model in (nn.Linear(2, 2), plain)]
    return once[0], once[1], errors


@needs_grad_dtype
def test_they_are_the_sums_that_the_reduction_made() -> None:
    for once, twice, (unsharded, unreduced) in on_ranks(2, reduced_twice):
        assert once and twice
        assert unsharded.startswith("ArgumentError: model: Linear, of which nothing is sharded")
        assert "without MixedPrecisionPolicy(reduce_dtype=torch.float32)" in unreduced


def reduced_by_hand(mode: str, replicated: str) -> tuple[dict[str, str], list[Tensor], float]:
    """In a rank: main_grad is added up by kernels and averaged behind backward, as Megatron does. Or one process."""
    model = model_of(torch.bfloat16)
    by_kernels(model)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    seeds = [dist.get_rank()] if ranks > 1 else [0, 1]
    with AdamW(
        model.parameters(), lr=1e-2, max_grad_norm=0.2, speculation=mode, threads=1, replicated=replicated
    ) as optimizer:
        for step in range(3):
            optimizer.zero_grad()
            for seed in seeds:
                precise_loss(model, 10 * step + seed).backward()
            for param in parameters_of(model):
                main = param.main_grad
                if ranks > 1:
                    dist.all_reduce(main)
                main.div_(2)
                param.grad = None  # as Megatron's hook does with what kernels return
            optimizer.step()
        weights = [param.detach().clone() for param in model.parameters()]
        return optimizer.state_digests(), weights, optimizer.stats()["buckets_speculated"]


@pytest.mark.parametrize(("replicated", "mode"), [("replicate", "always"), ("shard", "never")])
def test_main_grad_that_is_reduced_by_hand(replicated: str, mode: str) -> None:
    _, expected, _ = reduced_by_hand("never", "replicate")
    for _, weights, speculated in on_ranks(2, reduced_by_hand, mode, replicated):
        assert all(torch.equal(one, other) for one, other in zip(weights, expected, strict=True))
        assert speculated == 0, "nothing says during backward that it is reduced"


def reduced_by_ddp(with_main_grad: bool) -> tuple[list[Tensor], float]:
    """In a rank: what DDP has reduced is added to main_grad behind backward."""
    module = model_of(torch.bfloat16)
    if with_main_grad:
        by_kernels(module)
    model = nn.parallel.DistributedDataParallel(module)
    with AdamW(module.parameters(), lr=1e-2, speculation="always", threads=1, model=model) as optimizer:
        for step in range(3):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            model(torch.randn(8, 16, generator=generator).bfloat16()).square().mean().backward()
            if with_main_grad:
                for param in module.parameters():
                    add_to_main_grad(param)
            optimizer.step()
        return [param.detach().clone() for param in module.parameters()], optimizer.stats()["buckets_speculated"]


def test_main_grad_under_ddp() -> None:
    """What the reduction hands over is not the gradient yet."""
    (ours, speculated), (theirs, _) = (on_ranks(2, reduced_by_ddp, given)[0] for given in (True, False))
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert speculated == 0


def unreduced() -> str:
    """In a rank: each has a main_grad of its own, and steps a part of the parameters."""
    model = model_of(torch.bfloat16)
    by_kernels(model)
    with AdamW(model.parameters(), threads=1, replicated="shard", rank_timeout=20.0) as optimizer:
        precise_loss(model, dist.get_rank()).backward()
        for param in model.parameters():
            param.grad = None
        return error_of(optimizer.step)


def test_a_main_grad_that_was_not_reduced_is_refused() -> None:
    for error in on_ranks(2, unreduced):
        assert "gradient" in error and "RankError" in error
