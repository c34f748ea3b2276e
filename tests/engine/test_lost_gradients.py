"""A packed gradient that never reaches host memory: the step that needs it is abandoned, and the caller is told."""

from __future__ import annotations

import pytest
import torch

from benchmarks.emulation.clock import VirtualClock
from benchmarks.emulation.link import VirtualLink
from benchmarks.emulation.training import layer_shard
from benchmarks.emulation.virtual_pool import VirtualPool
from superoffload.engine.bucket import GroupHyper
from superoffload.engine.engine import Engine
from superoffload.engine.engine_options import EngineOptions
from superoffload.errors import DeviceError, WorkerError

SIZE = 64


class Lossy:
    """Two shards over a link in virtual time whose copies take a second each."""

    def __init__(self, mode: str, numel: int = SIZE) -> None:
        self.clock = VirtualClock()
        self.link = VirtualLink(self.clock, lambda size: 1.0, lambda size: 1.0)
        pool = VirtualPool(self.clock, lambda operation, numel: 1.0)
        options = EngineOptions(mode, 1024, [-1], clock=self.clock.seconds, pool=pool)
        self.engine = Engine(self.link, options, lambda group: GroupHyper(1e-2, 0.9, 0.99, 1e-8, 0.1))
        self.engine.layout.add_shards([layer_shard(i, torch.ones(numel).bfloat16()) for i in range(2)])
        self.first, self.second = reversed(self.engine.shards)
        self.gradient = torch.ones(numel).bfloat16()

    def step(self, *, later: bool = False) -> None:
        self.engine.arrive(self.first, self.gradient)
        self.engine.arrive(self.second, self.gradient)
        self.engine.apply(self.engine.decide(unscale=1.0, max_grad_norm=None), later=later)


@pytest.mark.parametrize("mode", ["always", "never"])
def test_a_retraction_tells_that_what_was_packed_beside_it_is_lost(mode: str) -> None:
    lossy = Lossy(mode)
    lossy.step()
    masters = [shard.master.clone() for shard in lossy.engine.shards]
    lossy.link.lose(0, "planted")
    lossy.engine.arrive(lossy.first, lossy.gradient)
    lossy.engine.arrive(lossy.second, lossy.gradient)  # in one bucket, whose copy is lost
    lossy.clock.run_dry()
    with pytest.raises(WorkerError, match="planted"):
        lossy.engine.retract(lossy.second)
    assert not lossy.engine.is_filling, "the step is abandoned, not continued without the gradient that is lost"
    for shard, then in zip(lossy.engine.shards, masters, strict=True):
        assert torch.equal(shard.master, then)
    lossy.step()
    assert lossy.engine.stats()["steps"] == 2


def test_parameters_that_the_step_before_has_left_are_delivered_before_a_step_is_abandoned() -> None:
    lossy = Lossy("never", 1024)  # in a bucket each
    lossy.step()
    lossy.step(later=True)
    assert len(lossy.engine.tail.landing_shards()) == 2
    lossy.link.lose(0, "planted")
    lossy.engine.arrive(lossy.first, lossy.gradient)  # delivers its own bucket only
    assert len(lossy.engine.tail.landing_shards()) == 1
    lossy.clock.run_dry()
    with pytest.raises(DeviceError, match="planted"):
        lossy.engine.restore(lossy.first)
    assert not lossy.engine.tail.is_landing and not lossy.engine.is_filling
    for shard in lossy.engine.shards:
        assert torch.equal(shard.target(), shard.master.bfloat16())
    lossy.engine.quiesce()  # the error was told
