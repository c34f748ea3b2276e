"""fp32 gradients of bf16 parameters among ranks: FSDP2's reduction in fp32, micro-batches that add up in fp32
(accumulate_dtype), and main_grad that its user reduces."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from superoffload import AdamW
from superoffload.integrations.fsdp2 import keep_reduced_gradients
from tests.support.adamw_training import model_of
from tests.support.fp32_gradients import add_to_main_grad, by_kernels, needs_grad_dtype, parameters_of, precise_loss
from tests.support.rank_processes import (
    BF16,
    data_rank,
    error_of,
    flat_mesh,
    net,
    on_ranks,
    optimizer_of,
    shard,
    tokens_of,
    whole,
)

MICROS = 4
ASKED: dict[str, Any] = {"accumulate_dtype": "fp32"}
BF16_NET = partial(net, torch.bfloat16)


def sharded_net() -> Any:
    return shard(BF16_NET(), flat_mesh(), BF16)


def trained_of(model: nn.Module) -> list[Any]:
    return [param for param in model.parameters() if param.requires_grad]


def gradients_of(model: nn.Module) -> list[Tensor]:
    """Whole, in fp32."""
    return [whole(param.grad).float() for param in trained_of(model)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def window(model: Any, number: int, *, synced: bool) -> None:
    """``synced``: every micro-batch is reduced, as FSDP2 does where nothing else is said."""
    for micro in range(MICROS):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(synced or micro + 1 == MICROS)
        model.loss(tokens_of(MICROS * number + micro, data_rank())).backward()


def expected_gradients(*, synced: bool) -> list[Tensor]:
    """Of the first window: what each rank's micro-batches give in bf16, added by torch in fp32."""
    found: list[list[list[Tensor]]] = [[], []]  # of each rank, of each micro-batch
    for rank, micro in itertools.product(range(2), range(MICROS)):
        model = BF16_NET()
        model.loss(tokens_of(micro, rank)).backward()
        found[rank].append(gradients_of(model))
    zero, sums = torch.zeros(()), []
    for first, second in zip(*(zip(*micros, strict=True) for micros in found), strict=True):
        if synced:
            sums.append(sum(((a + b) / 2 for a, b in zip(first, second, strict=True)), zero))
        else:
            sums.append((sum(first, zero) + sum(second, zero)) / 2)
    return sums


def accumulated(synced: bool, kept: bool, mode: str, compares: bool) -> dict[str, str]:
    """``kept``: the user has said it to FSDP2, and names no model. ``compares``: the first sums are those of fp32."""
    model = sharded_net()
    if kept:
        keep_reduced_gradients(model)
    options: dict[str, Any] = {"lr": 3e-3, "threads": 1, "bucket_numel": 1024, "rank_timeout": 20.0, **ASKED}
    with AdamW(trained_of(model), speculation=mode, model=None if kept else model, **options) as optimizer:
        for number in range(4):
            optimizer.zero_grad()
            optimizer.max_grad_norm = 0.05 if number == 2 else 50.0
            window(model, number, synced=synced)
            assert number or not compares or same(gradients_of(model), expected_gradients(synced=synced))
            optimizer.step()
        stats = optimizer.stats()
        assert stats["clipped_steps"] >= 1 and (stats["buckets_speculated"] > 0) == (mode == "always")
        return optimizer.state_digests()


@needs_grad_dtype
@pytest.mark.parametrize("synced", [True, False])
def test_micro_batches_add_up_in_fp32_and_speculation_changes_nothing(synced: bool) -> None:
    always = on_ranks(2, accumulated, synced, synced, "always", False)
    assert always == on_ranks(2, accumulated, synced, not synced, "never", True)


def held_twice() -> None:
    model, plain, unused = sharded_net(), sharded_net(), sharded_net()
    first = AdamW(trained_of(model), threads=1, model=model, **ASKED)
    with optimizer_of(model, **ASKED) as second, optimizer_of(unused, **ASKED):
        first.close()
        window(model, 0, synced=True)
        assert {param.grad.dtype for param in trained_of(model)} == {torch.float32}
        second.step()
        second.zero_grad()
    for one in (model, plain, unused):
        one.load_state_dict(plain.state_dict())
        window(one, 0, synced=True)
        assert {param.grad.dtype for param in trained_of(one)} == {torch.bfloat16}
    assert all(same(gradients_of(one), gradients_of(plain)) for one in (model, unused)), "torch's own again"


@needs_grad_dtype
def test_the_last_optimizer_takes_back_what_fsdp2_was_told() -> None:
    on_ranks(2, held_twice)


def sharded_later(named: bool) -> str:
    """As Accelerate does it: parameters that fully_shard has made take the place of those that there were."""
    model = BF16_NET()
    options: dict[str, Any] = {"threads": 1, "rank_timeout": 20.0, "model": model if named else None}
    with AdamW(trained_of(model), **ASKED, **options) as optimizer:
        before = trained_of(model)
        shard(model, flat_mesh(), BF16)
        optimizer.param_groups[0]["params"] = trained_of(model)
        if not named:
            return error_of(optimizer.step)
        optimizer.synchronize()
        assert {param.grad_dtype for param in before} == {torch.bfloat16}
        window(model, 0, synced=True)
        assert same(gradients_of(model), expected_gradients(synced=True))
        optimizer.step()
        assert optimizer.stats()["steps"] == 1
        return ""


@needs_grad_dtype
def test_parameters_that_are_sharded_behind_the_optimizer() -> None:
    on_ranks(2, sharded_later, True)
    for error in on_ranks(2, sharded_later, False):
        assert error.startswith("ArgumentError: accumulate_dtype='fp32'") and "pass model=" in error


def refused() -> list[str]:
    narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    plain, rounded, unnamed = (shard(BF16_NET(), flat_mesh(), policy) for policy in (None, narrow, BF16))
    replica, behind = (DistributedDataParallel(model_of(torch.bfloat16)) for _ in range(2))
    made = [(plain, plain), (rounded, rounded), (unnamed, None), (replica, replica)]
    errors = [error_of(partial(AdamW, params.parameters(), model=model, **ASKED)) for params, model in made]
    for params, _ in made:
        assert {param.grad_dtype for param in params.parameters()} == {torch.bfloat16}
    with AdamW(behind.parameters(), threads=1, **ASKED):  # DDP that we do not know of says it itself
        errors.append(error_of(lambda: behind(torch.ones(2, 16).bfloat16()).sum().backward()))
    mine = model_of(torch.bfloat16)
    with AdamW(mine.parameters(), threads=1, rank_timeout=60.0, **(ASKED if dist.get_rank() == 0 else {})) as optimizer:
        for param in mine.parameters():
            param.grad = torch.ones_like(param, dtype=param.grad_dtype)
        errors.append(error_of(optimizer.step))
    AdamW(shard(net(torch.float32), flat_mesh()).parameters(), **ASKED).close()  # fp32 parameters need no model=
    return errors + [error_of(partial(keep_reduced_gradients, model)) for model in (nn.Linear(2, 2), plain)]


@needs_grad_dtype
def test_what_cannot_be_served_is_refused() -> None:
    for plain, rounded, unnamed, replica, behind, one_rank, unsharded, unreduced in on_ranks(2, refused):
        assert "reduce_dtype=None: gradients would be rounded" in plain
        assert "reduce_dtype=torch.bfloat16: gradients would be rounded" in rounded
        assert "is a DTensor" in unnamed and "pass model=" in unnamed
        assert "is reduced by DistributedDataParallel" in replica
        assert all(error.startswith("ArgumentError: accumulate_dtype='fp32'") for error in (plain, unnamed, replica))
        assert "Expected BFloat16, got Float" in behind
        assert one_rank.startswith("RankError") and "accumulate_dtype" in one_rank
        assert unsharded.startswith("ArgumentError: model: Linear, of which nothing is sharded")
        assert "without MixedPrecisionPolicy(reduce_dtype=torch.float32)" in unreduced


def by_hand(mode: str, replicated: str) -> list[Tensor]:
    """main_grad is added up by kernels and averaged behind backward, as Megatron does. In a rank, or one process."""
    model = model_of(torch.bfloat16)
    by_kernels(model)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    options: dict[str, Any] = {"lr": 1e-2, "max_grad_norm": 0.2, "threads": 1, "replicated": replicated}
    with AdamW(model.parameters(), speculation=mode, **options) as optimizer:
        for step in range(3):
            optimizer.zero_grad()
            for seed in [dist.get_rank()] if ranks > 1 else [0, 1]:
                precise_loss(model, 10 * step + seed).backward()
            for param in parameters_of(model):
                if ranks > 1:
                    dist.all_reduce(param.main_grad)
                param.main_grad.div_(2)
                param.grad = None  # as Megatron's hook does with what kernels return
            optimizer.step()
        assert optimizer.stats()["buckets_speculated"] == 0, "nothing says during backward that it is reduced"
        return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize(("replicated", "mode"), [("replicate", "always"), ("shard", "never")])
def test_main_grad_that_is_reduced_by_hand(replicated: str, mode: str) -> None:
    expected = by_hand("never", "replicate")
    assert all(same(weights, expected) for weights in on_ranks(2, by_hand, mode, replicated))


def by_ddp(with_main_grad: bool) -> tuple[list[Tensor], float]:
    """What DDP has reduced is added to main_grad behind backward."""
    module = model_of(torch.bfloat16)
    if with_main_grad:
        by_kernels(module)
    model = DistributedDataParallel(module)
    with AdamW(module.parameters(), lr=1e-2, speculation="always", threads=1, model=model) as optimizer:
        for step in range(3):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            model(torch.randn(8, 16, generator=generator).bfloat16()).square().mean().backward()
            for param in module.parameters() if with_main_grad else ():
                add_to_main_grad(param)
            optimizer.step()
        return [param.detach().clone() for param in module.parameters()], optimizer.stats()["buckets_speculated"]


def test_main_grad_under_ddp() -> None:
    """What the reduction hands over is not the gradient yet."""
    (ours, speculated), (theirs, _) = (on_ranks(2, by_ddp, given)[0] for given in (True, False))
    assert same(ours, theirs) and speculated == 0
