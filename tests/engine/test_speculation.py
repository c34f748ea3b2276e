"""What speculation goes by: how much is packed, and the part of the norm that is known. (Fates: tests/fuzz.)"""

from __future__ import annotations

import pytest
import torch

from superoffload.engine.bucket import BucketState
from tests.support.engine_rig import Settings, rig


def test_what_is_packed_is_known_after_every_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """The share that the schedule is asked with, against the states of all buckets."""
    asked: list[float] = []
    with rig(Settings([[1024, 1500, 700]], bucket_numel=1024)) as made:

        def should_speculate(packed: float) -> bool:
            in_this_step = (BucketState.READY, BucketState.SPECULATED)
            counted = sum(bucket.numel for bucket in made.engine.buckets if bucket.state in in_this_step)
            assert packed == counted / 3224
            asked.append(packed)
            return len(asked) % 2 == 1

        monkeypatch.setattr(made.engine.schedule, "should_speculate", should_speculate)
        for _ in range(3):
            gradients = made.backward()
            for shard in made.shards[:2]:  # two of them come anew
                made.engine.retract(shard)
                made.arrive(shard, gradients[shard.index])
            made.engine.decide(unscale=1.0, max_grad_norm=None)
            made.engine.retract(made.shards[2])
            made.arrive(made.shards[2], gradients[2])
            made.step_both(gradients)
            made.check()
    assert max(asked) == 1.0 and len(set(asked)) > 3


def test_a_partial_norm_that_proves_a_clip_stops_speculation() -> None:
    with rig(Settings([[1024] * 4], bucket_numel=1024)) as made:
        made.engine.speculator.expect(unscale=1.0, max_grad_norm=55.0)  # the norm of three gradients of four
        made.step_both(made.backward(), max_grad_norm=55.0)
        made.check()
        stats = made.engine.stats()
        assert [stats[f"buckets_{fate}"] for fate in ("speculated", "replayed", "stepped")] == [2, 2, 2]


def test_the_partial_norm_is_of_this_steps_gradients_once_each() -> None:
    """Of one that comes twice the later, and of none that the step before has left to be delivered."""
    with rig(Settings([[1024] * 4], bucket_numel=1024)) as made:
        engine, shards, ones = made.engine, list(reversed(made.shards)), torch.ones(1024)
        for later in (False, True):
            for shard in shards:
                engine.arrive(shard, ones)
            engine.apply(engine.decide(unscale=1.0, max_grad_norm=None), later=later)
        engine.speculator.expect(unscale=1.0, max_grad_norm=(3.5 * 1024) ** 0.5)  # four would prove a clip
        for shard in shards[:2]:
            engine.arrive(shard, ones)
        before = engine.stats()["buckets_speculated"]
        for _ in range(4):
            engine.retract(shards[1])
            assert engine.speculator.norm.look() == 1024.0
            engine.arrive(shards[1], ones)
        assert engine.stats()["buckets_speculated"] == before + 4
        assert engine.speculator.norm.squares == 2048.0
