"""Delivery on demand with several ranks: nothing is gathered before it has landed, and all bits are the eager ones."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from superoffload import _native
from superoffload.engine.bucket import Bucket
from superoffload.engine.bucket_state import BucketState
from superoffload.engine.speculation_schedule import Schedule
from superoffload.engine.tail import Tail
from superoffload.optimizer import module_hooks
from tests.support.compatibility import compat
from tests.support.fsdp2_cases import CLIPPED, POISONED, Case, build, poison
from tests.support.layouts import layouts
from tests.support.rank_faults import train_until_error
from tests.support.rank_processes import (
    BF16,
    data_rank,
    flat_mesh,
    loss_of,
    net,
    on_ranks,
    optimizer_of,
    tokens_of,
)

STEPS = 5


@dataclass(frozen=True)
class Demand:
    """What a case adds to how its model is sharded."""

    case: Case = field(default_factory=Case)
    prefetch: int = 0  # blocks that each block gathers ahead of time
    grouped: bool = False  # the ends are gathered together
    unshards: bool = False  # the loop gathers by hand
    evaluates: bool = False
    rank_check: Any = "off"


def model_of(demand: Demand) -> Any:
    if demand.grouped:
        model: Any = net(tied=demand.case.tied, dtype=demand.case.dtype, layers=3)
        for layer in model.layers:
            fully_shard(layer, mesh=flat_mesh())
        fully_shard([model.embedding, model.head], mesh=flat_mesh())
        fully_shard(model, mesh=flat_mesh())
    else:
        model = build(demand.case)
    layers: Sequence[Any] = list(model.layers)
    for i, layer in enumerate(layers):
        if demand.prefetch:
            layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 1 + demand.prefetch])
            layer.set_modules_to_backward_prefetch(layers[max(0, i - demand.prefetch) : i][::-1])
    if demand.prefetch:
        model.set_modules_to_forward_prefetch(layers[: demand.prefetch])
    return model


def trained(demand: Demand, delivery: str, mode: str, *, checked: bool = False, steps: int = STEPS) -> Any:
    """Digests and losses; ``checked``: every read of an undelivered parameter raises."""
    rank, world = data_rank(), dist.get_world_size()
    model = model_of(demand)
    options = {"delivery": delivery, "speculation": mode, "rank_check": demand.rank_check}
    losses = []
    kinds = {"state_dtype": demand.case.state_dtype, "master_dtype": demand.case.master_dtype}
    with optimizer_of(model, **kinds, **options) as optimizer:
        watching: AbstractContextManager[Any] = optimizer.check_reads() if checked else nullcontext()
        with watching:
            for step in range(steps):
                optimizer.max_grad_norm = 50.0
                optimizer.zero_grad()
                if demand.unshards:
                    model.layers[0].unshard(async_op=True)
                for micro in range(demand.case.micro_batches):
                    if isinstance(model, FSDPModule):
                        model.set_requires_gradient_sync(micro + 1 == demand.case.micro_batches)
                    loss = model.loss(tokens_of(step * demand.case.micro_batches + micro, rank))
                    loss.backward()
                    losses.append(loss.item())
                if step == POISONED:
                    poison(model, dist.get_rank(), world)
                if step == CLIPPED:
                    optimizer.max_grad_norm = 0.05
                optimizer.step()
                ordered = step > 0 if isinstance(model, FSDPModule) else step > 1
                if delivery == "on_demand" and ordered and step != POISONED and demand.rank_check == "off":
                    assert optimizer._engine.tail.is_landing
                if demand.evaluates:
                    with torch.no_grad():
                        losses.append(model.loss(tokens_of(100 + step, rank)).item())
                    model.reshard()
        return optimizer.state_digests(), losses


def both(demand: Demand) -> bool:
    """In a rank: on demand and speculative, against eager and synchronous."""
    return bool(trained(demand, "on_demand", "always") == trained(demand, "eager", "never"))


CASES = {
    "fp32, kept gathered, evaluated": (2, Demand(Case(reshard=False), evaluates=True)),
    "bf16, micro-batches, checkpointing": (
        2, Demand(Case(dtype=torch.bfloat16, policy=BF16, micro_batches=3, checkpointing=True))
    ),
    "tied ends in a group": (2, Demand(Case(tied=True), grouped=True, rank_check="light")),
    "compiled": (2, Demand(Case(compiled=True, layers=1))),
    "gathered ahead and by hand": (2, Demand(Case(layers=4), prefetch=2, unshards=True, evaluates=True)),
    "four ranks, uneven and empty shards": (4, Demand(Case(layers=1, width=5), rank_check="full")),
    "replicas": (4, Demand(Case(replicas=True, tied=True), rank_check="light")),
}  # fmt: skip


@compat("delivery on demand: the bits of eager delivery", "fsdp2")
@pytest.mark.parametrize("name", CASES)
def test_fsdp2_has_the_bits_of_eager_delivery(name: str) -> None:
    count, demand = CASES[name]
    assert on_ranks(count, both, demand) == [True] * count


@layouts("delivery on demand: the bits of eager delivery", columns=("mesh", "stages"))
def test_meshes_and_stages_have_the_bits_of_eager_delivery(ranks: Any) -> None:
    assert all(ranks(2, both, Demand(Case(width=12))))


def watched(demand: Demand) -> bool:
    return bool(trained(demand, "on_demand", "never", checked=True) == trained(demand, "eager", "never"))


@pytest.mark.parametrize("name", ["tied ends in a group", "gathered ahead and by hand"])
def test_every_gather_of_fsdp2_waits(name: str) -> None:
    """No all-gather, copy or kernel touches what has not landed: the debug mode sees each of them."""
    assert on_ranks(2, watched, CASES[name][1]) == [True, True]


def unseen() -> bool:
    """A torch that does not show what it gathers together: everything lands at the first gather."""
    with mock.patch.object(module_hooks, "gathered_with", lambda module: None):
        return watched(CASES["gathered ahead and by hand"][1])


def test_without_a_view_of_what_is_gathered_everything_lands_at_once() -> None:
    assert on_ranks(2, unseen) == [True, True]


def replicated(delivery: str, mode: str) -> Any:
    model: Any = DistributedDataParallel(net(torch.float32), find_unused_parameters=True)
    losses = []
    with optimizer_of(model, delivery=delivery, speculation=mode, rank_check="light") as optimizer:
        for step in range(8):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            with torch.no_grad():
                losses.append(model.module.loss(tokens_of(50 + step, 0)).item())
        return optimizer.state_digests(), losses


def ddp() -> bool:
    return bool(replicated("on_demand", "always") == replicated("eager", "never"))


def test_ddp_has_the_bits_of_eager_delivery() -> None:
    assert on_ranks(2, ddp) == [True, True]


def in_two_phases(delivery: str, case: Case) -> bool:
    """Every step publishes first and settles as late as can be; no check may look at masters before that."""
    demand = Demand(case, rank_check="light")

    def behind(tail: Tail) -> None:
        published = (b for b in tail._layout.buckets if b.state is BucketState.PUBLISHED)
        tail.unsettled.update((b, _native.Completion()) for b in published)

    def settled(tail: Tail, bucket: Bucket) -> None:
        tail._executor.pool.submit(bucket.work, _native.Operation.settle, 1, bucket.running).wait()

    with (
        mock.patch.object(Schedule, "share_to_publish", lambda schedule, situation: 1.0),
        mock.patch.object(Tail, "_settle_behind", behind),
        mock.patch.object(Tail, "_wait_for_settle", settled),
    ):
        published = trained(demand, delivery, "never", steps=8)
    return bool(published == trained(demand, "eager", "always", steps=8))


@pytest.mark.parametrize(
    ("delivery", "case"),
    [("eager", Case(dtype=torch.bfloat16, master_dtype="split")), ("on_demand", Case())],
    ids=["eager, split", "on demand, fp32"],
)
def test_two_phases(delivery: str, case: Case) -> None:
    assert on_ranks(2, in_two_phases, delivery, case) == [True, True]


def test_a_bucket_that_is_not_published_is_found_all_the_same() -> None:
    results = on_ranks(2, train_until_error, "skip_publish", 10, 1, False, "light", 60, "on_demand")
    assert len({message for _, message in results}) == 1
    number, message = results[0]
    assert "the published parameter is not round(master)" in message and 10 <= number <= 45
