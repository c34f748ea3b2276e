"""accumulate_dtype="fp32" among ranks: micro-batches add up in fp32 before and behind FSDP2's reduction."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from superoffload import AdamW
from superoffload.integrations.fsdp2 import keep_reduced_gradients
from superoffload.optimizer.packed_gradient import packed_in
from tests.support.adamw_training import model_of
from tests.support.compatibility import compat
from tests.support.fake_cuda import Fake, on_fake_device, on_host
from tests.support.fp32_gradients import needs_grad_dtype
from tests.support.layouts import layouts
from tests.support.link_runs import LATE
from tests.support.micro_batches import ROW
from tests.support.rank_processes import (
    BF16,
    Net,
    data_rank,
    error_of,
    flat_mesh,
    net,
    on_ranks,
    optimizer_of,
    shard,
    tokens_of,
)

MICROS = 4
ASKED: dict[str, Any] = {"accumulate_dtype": "fp32"}


def sharded_net() -> Net:
    return shard(net(torch.bfloat16), flat_mesh(), BF16)


def window(model: Any, number: int, *, synced: bool) -> None:
    """``synced``: every micro-batch is reduced, as FSDP2 does where nothing else is said."""
    for micro in range(MICROS):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(synced or micro + 1 == MICROS)
        model.loss(tokens_of(MICROS * number + micro, data_rank())).backward()


def trained_of(model: nn.Module) -> list[Tensor]:
    return [param for param in model.parameters() if param.requires_grad]


def expected_gradients(*, synced: bool) -> list[Tensor]:
    """Of the first window: what each rank's micro-batches give in bf16, added by torch in fp32."""
    found: list[list[list[Tensor]]] = [[], []]  # of each rank, of each micro-batch
    for rank, micro in itertools.product(range(2), range(MICROS)):
        model = net(torch.bfloat16)
        model.loss(tokens_of(micro, rank)).backward()
        found[rank].append([p.grad.float() for p in trained_of(model) if p.grad is not None])
    zero, sums = torch.zeros(()), []
    for first, second in zip(*(zip(*micros, strict=True) for micros in found), strict=True):
        if synced:
            sums.append(sum(((a + b) / 2 for a, b in zip(first, second, strict=True)), zero))
        else:
            sums.append((sum(first, zero) + sum(second, zero)) / 2)
    return sums


def whole_gradients(model: nn.Module) -> list[Tensor]:
    """In fp32, to be compared."""
    grads: list[Any] = [param.grad for param in trained_of(model)]
    return [grad.full_tensor().float() for grad in grads]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def summed_in_rank(synced: bool) -> tuple[bool, bool]:
    """Whether gradients are those sums with it, and without it."""
    expected, found = expected_gradients(synced=synced), []
    for options in (ASKED, {}):
        model = sharded_net()
        with optimizer_of(model, **options):
            window(model, 0, synced=synced)
            found.append(same(whole_gradients(model), expected))
    return found[0], found[1]


@needs_grad_dtype
@pytest.mark.parametrize("synced", [True, False])
def test_the_sums_are_those_of_fp32(synced: bool) -> None:
    assert on_ranks(2, summed_in_rank, synced) == [(True, False)] * 2


def trained_in_rank(synced: bool, kept: bool, mode: str) -> tuple[dict[str, str], float]:
    """``kept``: the user has said it to FSDP2, and names no model."""
    model = sharded_net()
    if kept:
        keep_reduced_gradients(model)
    options: dict[str, Any] = {"lr": 3e-3, "threads": 1, "bucket_numel": 1024, "rank_timeout": 20.0, **ASKED}
    with AdamW(trained_of(model), speculation=mode, model=None if kept else model, **options) as optimizer:
        for number in range(4):
            optimizer.zero_grad()
            optimizer.max_grad_norm = 0.05 if number == 2 else 50.0
            window(model, number, synced=synced)
            optimizer.step()
        assert optimizer.stats()["clipped_steps"] >= 1
        return optimizer.state_digests(), optimizer.stats()["buckets_speculated"]


@compat(ROW, "fsdp2")
@needs_grad_dtype
@pytest.mark.parametrize("synced", [True, False])
def test_speculation_changes_nothing(synced: bool) -> None:
    always = on_ranks(2, trained_in_rank, synced, synced, "always")
    never = on_ranks(2, trained_in_rank, synced, not synced, "never")
    assert [one[0] for one in always] == [one[0] for one in never]
    assert all(one[1] > 0 for one in always)


@layouts(ROW, columns=("mesh", "stages"))
@needs_grad_dtype
def test_speculation_changes_nothing_on_a_mesh_and_in_stages(ranks: Any) -> None:
    always, never = (ranks(2, trained_in_rank, True, False, mode) for mode in ("always", "never"))
    assert [one[0] for one in always] == [one[0] for one in never]
    assert all(one[1] > 0 for one in always)


def on_a_device_in_rank(on_device: bool) -> tuple[dict[str, str], int]:
    """Also how many gradients are freed behind a window."""
    fake = Fake()
    fake.delays(4, LATE)
    with on_fake_device(fake) if on_device else on_host():
        model = sharded_net()
        with optimizer_of(model, rank_check="off", **ASKED) as optimizer:
            for number in range(3):
                optimizer.zero_grad()
                for micro in range(2):
                    fake.synchronize()
                    model.loss(tokens_of(2 * number + micro, dist.get_rank())).backward()
                optimizer.step()
            fake.synchronize()
            freed = sum(packed_in(param.grad) is not None for param in model.parameters())
            return optimizer.state_digests(), freed


@needs_grad_dtype
def test_sharded_gradients_that_were_freed(request: pytest.FixtureRequest) -> None:
    Fake()  # compiled here, not by two ranks at once
    expected, found = on_ranks(2, on_a_device_in_rank, False), on_ranks(2, on_a_device_in_rank, True)
    assert [one[0] for one in found] == [one[0] for one in expected]
    assert all(one[1] == 0 for one in expected) and all(one[1] > 0 for one in found)


def held_twice_in_rank() -> tuple[list[set[Any]], bool]:
    """The dtypes of gradients with a second optimizer of the same group, behind the first, and behind both. Whether
    they are torch's own then, also in a model that was never trained with it."""
    model, plain, unused = sharded_net(), sharded_net(), sharded_net()
    first, found = ExitStack(), []

    def note_dtypes() -> None:
        window(model, 0, synced=True)
        found.append({param.grad.dtype for param in model.parameters() if param.grad is not None})

    first.enter_context(optimizer_of(model, **ASKED))
    with optimizer_of(model, **ASKED) as second, optimizer_of(unused, **ASKED):
        first.close()
        note_dtypes()
        second.step()
        second.zero_grad()
    for one in (model, plain, unused):
        one.load_state_dict(plain.state_dict())
    note_dtypes()
    for one in (plain, unused):
        window(one, 0, synced=True)
    expected = whole_gradients(plain)
    return found, all(same(whole_gradients(one), expected) for one in (model, unused))


@needs_grad_dtype
def test_the_last_optimizer_takes_back_what_fsdp2_was_told() -> None:
    assert on_ranks(2, held_twice_in_rank) == [([{torch.float32}, {torch.bfloat16}], True)] * 2


def sharded_later_in_rank(named: bool) -> str | bool:
    """As Accelerate does it: parameters that fully_shard has made take the place of those that there were."""
    model = net(torch.bfloat16)
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
        found = same(whole_gradients(model), expected_gradients(synced=True))
        optimizer.step()
        return found and optimizer.stats()["steps"] == 1


@needs_grad_dtype
def test_parameters_that_are_sharded_behind_the_optimizer() -> None:
    assert on_ranks(2, sharded_later_in_rank, True) == [True, True]
    for error in on_ranks(2, sharded_later_in_rank, False):
        assert error.startswith("ArgumentError: accumulate_dtype='fp32'") and "pass model=" in error


def refused_in_rank() -> list[str]:
    narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    plain, rounded, unnamed = (shard(net(torch.bfloat16), flat_mesh(), policy) for policy in (None, narrow, BF16))
    replica = nn.parallel.DistributedDataParallel(model_of(torch.bfloat16))
    behind = nn.parallel.DistributedDataParallel(model_of(torch.bfloat16))
    made = [(plain, plain), (rounded, rounded), (unnamed, None), (replica, replica)]
    errors = [error_of(partial(AdamW, params.parameters(), model=model, **ASKED)) for params, model in made]
    for params, _ in made:
        assert {param.grad_dtype for param in params.parameters()} == {torch.bfloat16}
    with AdamW(behind.parameters(), threads=1, **ASKED):
        errors.append(error_of(lambda: behind(torch.ones(2, 16).bfloat16()).sum().backward()))
    mine = model_of(torch.bfloat16)
    with AdamW(mine.parameters(), threads=1, rank_timeout=60.0, **(ASKED if dist.get_rank() == 0 else {})) as optimizer:
        for param in mine.parameters():
            param.grad = torch.ones_like(param, dtype=param.grad_dtype)
        errors.append(error_of(optimizer.step))
    AdamW(shard(net(torch.float32), flat_mesh()).parameters(), **ASKED).close()  # fp32 parameters need no model=
    return errors


@needs_grad_dtype
def test_what_cannot_be_served_is_refused() -> None:
    """DDP that we do not know of says so itself: docs/troubleshooting.md."""
    for plain, rounded, unnamed, replica, behind, one_rank in on_ranks(2, refused_in_rank):
        assert "reduce_dtype=None: gradients would be rounded" in plain
        assert "reduce_dtype=torch.bfloat16: gradients would be rounded" in rounded
        assert "is a DTensor" in unnamed and "pass model=" in unnamed
        assert "is reduced by DistributedDataParallel" in replica
        assert all(error.startswith("ArgumentError: accumulate_dtype='fp32'") for error in (plain, unnamed, replica))
        assert "Expected BFloat16, got Float" in behind
        assert one_rank.startswith("RankError") and "accumulate_dtype" in one_rank
