"""Delivery on demand with several ranks: nothing is gathered before it has landed, and all bits are the eager ones.
Other ways to shard: tests/integrations/test_fsdp2.py."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from superoffload import _native
from superoffload.engine.after_verdict import LastStep
from superoffload.engine.bucket import Bucket, BucketState
from superoffload.engine.schedule import Schedule
from superoffload.integrations.fsdp2 import ShardedModule
from tests.support.fsdp2_cases import Case, build, train
from tests.support.rank_processes import loss_of, net, on_ranks, optimizer_of, tokens_of

GROUPED = Case(tied=True, grouped=True, layers=3, rank_check="light")
AHEAD = Case(layers=4, prefetch=2, unshards=True, evaluates=True)


def trained(case: Case, delivery: str, mode: str, *, checked: bool = False, **options: Any) -> Any:
    """Digests and losses; ``checked``: every read of an undelivered parameter raises."""
    model = build(case)
    lands = delivery == "on_demand" and case.rank_check == "off"
    given = {"delivery": delivery, "speculation": mode, "rank_check": case.rank_check, **case.kinds}
    with optimizer_of(model, **given) as optimizer, optimizer.check_reads() if checked else nullcontext():
        losses = train(model, optimizer, case, lands=lands, **options)
        return optimizer.state_digests(), losses


def gathered(case: Case, seen: bool) -> None:
    """``seen``: torch shows what it gathers together; else everything lands at the first gather."""
    with nullcontext() if seen else mock.patch.object(ShardedModule, "together", lambda module: None):
        assert trained(case, "on_demand", "never", checked=True) == trained(case, "eager", "never")


@pytest.mark.parametrize(("case", "seen"), [(GROUPED, True), (AHEAD, True), (AHEAD, False)])
def test_every_gather_of_fsdp2_waits(case: Case, seen: bool) -> None:
    """No all-gather, copy or kernel touches what has not landed: the debug mode sees each of them."""
    on_ranks(2, gathered, case, seen)


def replicated(delivery: str, mode: str) -> Any:
    model: Any = DistributedDataParallel(net(torch.float32), find_unused_parameters=True)
    losses = []
    with optimizer_of(model, delivery=delivery, speculation=mode, rank_check="light") as optimizer:
        for step in range(8):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                losses += [loss.item(), model.module.loss(tokens_of(50 + step, 0)).item()]
        return optimizer.state_digests(), losses


def ddp() -> None:
    assert replicated("on_demand", "always") == replicated("eager", "never")


def test_ddp_has_the_bits_of_eager_delivery() -> None:
    on_ranks(2, ddp)


def in_two_phases(delivery: str, case: Case) -> None:
    """Every step publishes first and settles as late as can be; no check may look at masters before that."""

    def behind(last_step: LastStep) -> None:
        published = (b for b in last_step._layout.buckets if b.state is BucketState.PUBLISHED)
        last_step.unsettled.update((b, _native.Completion()) for b in published)

    def settled(last_step: LastStep, bucket: Bucket) -> None:
        last_step._executor.pool.submit(bucket.work, _native.Operation.settle, 1, bucket.running).wait()

    with (
        mock.patch.object(Schedule, "share_to_publish", lambda schedule, situation: 1.0),
        mock.patch.object(LastStep, "_settle_behind", behind),
        mock.patch.object(LastStep, "_wait_for_settle", settled),
    ):
        published = trained(case, delivery, "never", steps=8)
    assert published == trained(case, "eager", "always", steps=8)


@pytest.mark.parametrize(("delivery", "kind"), [("eager", "split"), ("on_demand", "fp32")])
def test_two_phases(delivery: str, kind: str) -> None:
    dtype = torch.bfloat16 if kind == "split" else torch.float32
    on_ranks(2, in_two_phases, delivery, Case(dtype=dtype, master_dtype=kind, rank_check="light"))
