"""Two-phase steps: published right after the verdict, settled behind the next forward, the same bits as in one pass."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from superoffload.engine.bucket import BucketState
from superoffload.errors import WorkerError
from superoffload.timeline import record
from tests.support.engine_rig import Rig, Settings, rig, to_numpy
from tests.support.guarded_arrays import assert_bits

TWO_PHASE = Settings([[1024] * 4], bucket_numel=1024, mode="never", published=1.0)


def step(made: Rig, clip: float | None = 1.0) -> None:
    made.step_both(made.backward(), max_grad_norm=clip)


def test_whoever_looks_finds_the_state_settled_and_a_gradient_settles_its_own_bucket() -> None:
    with rig(replace(TWO_PHASE, published=0.5)) as made:
        for look in (made.engine.quiesce, made.engine.tail.settle, made.engine.digests, made.engine.close):
            step(made)
            step(made)
            expected = [BucketState.PUBLISHED] * 2 + [BucketState.FILLING] * 2  # the first ones of forward
            assert [bucket.state for bucket in reversed(made.engine.buckets)] == expected
            if look == made.engine.quiesce:
                first = made.shards[0]
                made.arrive(first, made.gradient(first))
                assert made.engine.buckets[-1].state is BucketState.READY
                assert made.engine.buckets[-2].state is BucketState.PUBLISHED
                made.engine.abandon()
            look()
            assert not made.engine.tail.is_settling
            for shard, parameter in zip(made.shards, made.reference.parameters, strict=True):
                assert_bits("master", to_numpy(shard.read_masters()), parameter.master)
                assert_bits("exp_avg_sq", to_numpy(shard.exp_avg_sq), parameter.exp_avg_sq)


@pytest.mark.parametrize("chunk", [0, 2, 5, 9])
def test_a_worker_failure_is_raised_once_with_the_step_complete(chunk: int) -> None:
    """Chunks 0 to 3 publish, 4 to 7 settle, 8 and 9 are the next step's."""
    with rig(TWO_PHASE) as made:
        step(made)
        made.engine.pool.inject_fault(chunk, "planted")
        errors = []
        for _ in range(3):
            gradients = made.backward()
            try:
                made.step_both(gradients, max_grad_norm=1.0)
            except WorkerError as error:
                errors.append(str(error))
            made.check_published_unchanged()
        try:
            made.engine.quiesce()
        except WorkerError as error:
            errors.append(str(error))
        made.check()
        assert len(errors) == 1 and "planted" in errors[0]
        assert chunk < 4 or chunk > 7 or "the step before was completed" in errors[0]


def test_the_timeline_shows_both_phases(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    timeline = record(path)
    with rig(TWO_PHASE, recorder=timeline) as made:
        for _ in range(3):
            step(made)
        made.engine.close()
        timeline.close()
    events = [event for event in json.loads(path.read_text()) if event["ph"] == "X"]
    for verb in ("publish", "settle"):
        found = [event for event in events if f" {verb}:" in event["name"]]
        assert len(found) == 8, verb
        assert {event["args"]["fate"] for event in found} == {"stepped two-phase"}
        assert sorted(event["args"]["step"] for event in found) == [2] * 4 + [3] * 4, "the step it belongs to"


def test_a_split_master_is_settled_from_the_half_that_a_publish_has_kept() -> None:
    """The journal has room for it, also without speculation, and a bucket without room is stepped in one pass."""
    described = replace(TWO_PHASE, published_dtype=torch.bfloat16, split=True)
    with rig(described) as made:
        for _ in range(4):
            step(made)
        assert made.engine.stats()["buckets_two_phase"] == 12
        assert made.engine.stats()["journal_reserved_bytes"] == 4 * 2 * 1024
        made.check()
    with mock.patch("superoffload.engine.layout.reserved_bytes", lambda padded: 2 * padded - 1), rig(described) as made:
        for _ in range(4):
            step(made)
        assert made.engine.stats()["buckets_two_phase"] == 9  # the first step none; then room for three of four
        made.check()
