"""``apply(later=True)``: parameters that are delivered after the step, and gradients that stay where they arrive."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from superoffload.engine.bucket import BucketState, GroupHyper, Shard
from superoffload.engine.engine import Engine
from superoffload.engine.options import EngineOptions
from superoffload.errors import WorkerError
from superoffload.integrations.deepspeed.driver import PartitionLink
from superoffload.links.base import Link
from superoffload.links.host import HostLink

SIZES = (700, 3000, 1, 1024)
HYPER = GroupHyper(1e-2, 0.9, 0.99, 1e-8, 0.1)


class Flat:
    """An engine over unaligned slices of flat tensors, as ZeRO-3 has them."""

    def __init__(self, mode: str, *, in_place: bool, hyper: GroupHyper = HYPER) -> None:
        torch.manual_seed(0)
        total = sum(SIZES)
        self.master = torch.randn(total)
        self.moments = torch.zeros(2, total)
        self.published = self.master.bfloat16()
        self.gradients = torch.zeros(total, dtype=torch.bfloat16)
        link: Link = HostLink()
        if in_place:
            link = PartitionLink(lambda shard: self.slices(self.gradients)[shard.index], pin=False)
        self.engine = Engine(link, EngineOptions(mode, 1024, [-1]), lambda group: hyper)
        self.engine.layout.add_shards([self._shard(i) for i in range(len(SIZES))])

    def slices(self, flat: Tensor) -> list[Tensor]:
        return list(flat.split(list(SIZES)))

    def _shard(self, index: int) -> Shard:
        master, exp_avg, exp_avg_sq, published = (
            self.slices(flat)[index] for flat in (self.master, *self.moments, self.published)
        )
        dtypes = torch.bfloat16, torch.bfloat16
        return Shard(index, f"shard {index}", 0, SIZES[index], *dtypes, master, exp_avg, exp_avg_sq, lambda: published)

    def step(self, number: int, *, later: bool, clip: float | None = None) -> None:
        self.engine.speculator.expect(unscale=1.0, max_grad_norm=clip)
        generator = torch.Generator().manual_seed(number)
        values = torch.randn(sum(SIZES), generator=generator).bfloat16()
        for shard in reversed(self.engine.shards):
            self.engine.tail.land(shard)
            self.engine.retract(shard)
            self.slices(self.gradients)[shard.index].copy_(self.slices(values)[shard.index])
            self.engine.arrive(shard, self.slices(self.gradients)[shard.index])
        self.engine.apply(self.engine.decide(unscale=1.0, max_grad_norm=clip), later=later)


def digests(mode: str, *, in_place: bool, later: bool, clip: float | None) -> dict[str, str]:
    flat = Flat(mode, in_place=in_place)
    for number in range(5):
        flat.step(number, later=later, clip=clip)
    found = flat.engine.digests()
    flat.engine.close()
    return found


@pytest.mark.parametrize("clip", [None, 60.0])
def test_one_result_whenever_delivered_and_wherever_gradients_are(clip: float | None) -> None:
    expected = digests("never", in_place=False, later=False, clip=clip)
    for mode, in_place, later in (("never", True, True), ("always", False, True), ("always", True, False)):
        assert digests(mode, in_place=in_place, later=later, clip=clip) == expected


def test_a_shard_lands_alone() -> None:
    flat = Flat("always", in_place=True)
    flat.step(0, later=True)  # the first step settles the bucket order, so it delivers at once
    assert torch.equal(flat.published, flat.master.bfloat16())
    before = flat.published.clone()
    flat.step(1, later=True)
    assert torch.equal(flat.published, before), "nothing is delivered by itself"
    flat.engine.tail.land(flat.engine.shards[1])
    now, then = flat.slices(flat.published), flat.slices(before)
    assert torch.equal(now[1], flat.slices(flat.master)[1].bfloat16())
    assert torch.equal(now[3], then[3])
    for number, lands in enumerate(
        (flat.engine.tail.land, flat.engine.quiesce, flat.engine.digests, flat.engine.close)
    ):
        lands()
        assert torch.equal(flat.published, flat.master.bfloat16())
        if lands != flat.engine.close:
            flat.step(2 + number, later=True)


@pytest.mark.parametrize("lands", ["land", "quiesce"])
def test_a_worker_that_fails_after_the_verdict_is_reported_when_it_lands(lands: str) -> None:
    flat = Flat("never", in_place=True)
    expected = digests("never", in_place=True, later=False, clip=None)
    for number in range(4):
        flat.step(number, later=True)
    flat.engine.tail.land()
    flat.engine.pool.inject_fault(1, "planted")
    flat.step(4, later=True)
    with pytest.raises(WorkerError, match="planted"):
        (flat.engine.tail.land if lands == "land" else getattr(flat.engine, lands))()
    assert flat.engine.digests() == expected, "the step was completed all the same"
    flat.engine.close()


def test_settle_reports_a_failed_speculation_before_the_verdict() -> None:
    flat = Flat("always", in_place=True)
    flat.step(0, later=False)
    before = flat.engine.digests()
    flat.engine.pool.inject_fault(1, "planted")
    for shard in flat.engine.shards:
        flat.engine.arrive(shard, flat.slices(flat.gradients)[shard.index])
    with pytest.raises(WorkerError, match="planted"):
        flat.engine.await_speculation()
    assert not flat.engine.is_filling
    assert all(bucket.state is BucketState.FILLING for bucket in flat.engine.buckets)
    assert flat.engine.digests() == before
    flat.engine.close()
