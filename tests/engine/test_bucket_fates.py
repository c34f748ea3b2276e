"""Each end that a bucket can come to, and what is counted."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy.typing as npt
import pytest
import torch

from superoffload.engine.bucket import BucketState
from superoffload.errors import StateError
from tests.support.engine_rig import COUNTERS, Rig, Settings, rig

TWO = Settings([[1024, 1024]], bucket_numel=1024)  # two buckets


def backward(made: Rig, scale: float = 1.0, poison_first: float | None = None) -> dict[int, npt.NDArray[Any]]:
    """All gradients, in the order of backward."""
    gradients: dict[int, npt.NDArray[Any]] = {}
    for shard in reversed(made.shards):
        poison = poison_first if not gradients else None
        gradients[shard.index] = made.gradient(shard, scale, poison)
        made.arrive(shard, gradients[shard.index])
    return gradients


def counts(made: Rig) -> dict[str, float]:
    names = ("buckets_speculated", *COUNTERS, "buckets_stepped", "journal_overflows", "clipped_steps")
    stats = made.engine.stats()
    return {name.removeprefix("buckets_"): stats[name] for name in names if stats[name]}


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
            gradients = backward(made)
            for shard in made.shards[:2]:  # two of them come anew
                made.engine.retract(shard)
                made.arrive(shard, gradients[shard.index])
            made.engine.decide(unscale=1.0, max_grad_norm=None)
            made.engine.retract(made.shards[2])
            made.arrive(made.shards[2], gradients[2])
            made.step_both(gradients)
            made.check()
    assert max(asked) == 1.0 and len(set(asked)) > 3


@pytest.mark.parametrize(
    ("mode", "expected", "decided", "fates"),
    [
        ("always", (1.0, None), (1.0, None), {"speculated": 2, "committed": 2}),
        ("always", (1.0, None), (1.0, 1.0), {"speculated": 2, "replayed": 2, "clipped_steps": 1}),
        ("always", (0.5, None), (0.25, None), {"speculated": 2, "replayed": 2}),
        ("always", (0.0, None), (-0.0, None), {"speculated": 2, "replayed": 2}),  # exp_avg keeps the sign of a zero
        ("always", (1e-3, 1e308), (1e-3, 1e308), {"speculated": 2, "committed": 2}),
        ("never", (1.0, None), (1.0, None), {"stepped": 2}),
    ],
)
def test_fates(
    mode: str, expected: tuple[float, float | None], decided: tuple[float, float | None], fates: dict[str, int]
) -> None:
    with rig(replace(TWO, mode=mode)) as made:
        made.engine.speculator.expect(unscale=expected[0], max_grad_norm=expected[1])
        gradients = backward(made)
        with pytest.raises(StateError, match="shard 1: a second gradient"):
            made.arrive(made.shards[1], gradients[1])
        made.step_both(gradients, unscale=decided[0], max_grad_norm=decided[1])
        made.check()
        assert counts(made) == fates
        assert mode == "always" or made.engine.stats()["journal_reserved_bytes"] == 0


def test_skip_and_abandon() -> None:
    """A non-finite gradient stops speculation; one that comes late undoes it."""
    with rig(TWO) as made:
        made.step_both(backward(made, poison_first=math.nan))
        made.check()
        assert counts(made) == {}
        gradients = backward(made)
        made.engine.retract(made.shards[0])
        gradients[0][5] = math.inf
        made.arrive(made.shards[0], gradients[0])
        made.step_both(gradients)
        made.check()
        assert counts(made) == {"speculated": 2, "undone": 1, "skipped": 1}
        backward(made)
        for _ in range(2):
            made.engine.abandon()
            made.check()
            assert counts(made) == {"speculated": 4, "undone": 1, "skipped": 1, "abandoned": 2}


def test_a_partial_norm_that_proves_a_clip_stops_speculation() -> None:
    with rig(Settings([[1024] * 4], bucket_numel=1024)) as made:
        made.engine.speculator.expect(unscale=1.0, max_grad_norm=55.0)  # the norm of three gradients of four
        made.step_both(backward(made), max_grad_norm=55.0)
        made.check()
        assert counts(made) == {"speculated": 2, "replayed": 2, "stepped": 2, "clipped_steps": 1}


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


def test_buckets_follow_the_order_of_the_first_backward() -> None:
    with rig(Settings([[1024] * 4], bucket_numel=1024)) as made:
        made.arrive(made.shards[1], made.gradient(made.shards[1]))
        made.engine.abandon()  # so that it is not the order to follow
        assert [bucket.pieces[0].shard.index for bucket in made.engine.buckets] == [3, 2, 1, 0]
        order = [2, 0, 3]  # 1 has no gradient, and stays behind 2
        for _ in range(2):
            gradients = {index: made.gradient(made.shards[index]) for index in order}
            for index, gradient in gradients.items():
                made.arrive(made.shards[index], gradient)
            made.step_both(gradients)
            made.check()
            assert [bucket.pieces[0].shard.index for bucket in made.engine.buckets] == [2, 1, 0, 3]
            order = [3, 2, 1, 0]  # observed once


def test_a_gradient_between_decide_and_apply_is_refused() -> None:
    with rig(replace(TWO, sizes=[[100, 100, 100]])) as made:
        gradients = {1: made.gradient(made.shards[1])}
        made.arrive(made.shards[1], gradients[1])
        verdict = made.engine.decide(unscale=1.0, max_grad_norm=None)
        gradients[0] = made.gradient(made.shards[0])
        made.arrive(made.shards[0], gradients[0], in_backward=False)
        with pytest.raises(StateError, match="since decide"):
            made.engine.apply(verdict)
        made.step_both(gradients)
        made.check()
