"""Several ranks converge as one process does, and a fault that would stop them is noticed: 80 real steps."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from superoffload.distributed.launch import LocalRanks
from superoffload.errors import ArgumentError
from superoffload.tools.convergence.compare import SAFETY, Tolerance, stray, tolerance_of, unequal
from superoffload.tools.convergence.convergence_setup import Setup
from superoffload.tools.convergence.distributed_run import Curve, run
from superoffload.tools.convergence.engines import ENGINES, Engine, make_engine
from superoffload.tools.convergence.suite import single_runs
from tests.support.rank_faults import FAULTS, IN_THE_LOOP
from tests.support.rank_processes import pool, side_by_side

pytestmark = pytest.mark.convergence

# Long after the last trouble and the last late clip, and long enough to learn; `verify` trains for 200 steps.
REAL = Setup(steps=80)
# As many rows in a backward on four ranks as on two with their micro-batches: half the time, the same global batch.
FOUR = replace(REAL, micro_batches=1)
# In fp32 the order of summation changes next to nothing, so that even one bucket stepped twice in one step stands out.
SHARP = Setup(
    steps=40,
    dtype="fp32",
    max_grad_norm=1.0,
    nan_step=8,
    inf_step=15,
    late_clips=(20, 21),
    digest_every=5,
    rank_check="off",
)
FAULT_STEP = 12


def singles(setup: Setup) -> list[Curve]:
    with LocalRanks(2, init=False) as ranks:
        return single_runs(setup, ranks, print)


@pytest.fixture(scope="module")
def tolerance() -> Tolerance:
    return tolerance_of(singles(REAL))


@pytest.fixture(scope="module")
def sharp_tolerance() -> Tolerance:
    return tolerance_of(singles(SHARP))


def train(count: int, setup: Setup, engine: str, speculation: str) -> list[Curve]:
    curves: list[Curve] = pool(count).run(run, setup, engine, speculation)
    return curves


@pytest.mark.parametrize(("engine", "count"), [("fsdp2", 2), ("fsdp2", 4), ("ddp", 2), ("tp", 2), ("tp", 4)])
def test_ranks_converge_as_one_process(engine: str, count: int, tolerance: Tolerance) -> None:
    setup = FOUR if count == 4 else REAL
    calls = [(setup, engine, "always"), (setup, engine, "never")]
    speculative, synchronous = side_by_side(count, run, *calls)
    assert unequal(speculative, synchronous) == []
    assert len(speculative[0].digests) == REAL.steps // REAL.digest_every
    assert stray(speculative[0], tolerance) == []
    losses = speculative[0].losses
    assert sum(losses[-20:]) / 20 < losses[0] - 2.5, "it has learnt something"
    assert sum(math.isinf(norm) for norm in speculative[0].norms) == 2, "a NaN and an infinity on one rank"
    stats = speculative[0].stats
    assert stats["skipped_steps"] == 2 and stats["buckets_committed"] > 0 and stats["buckets_replayed"] > 0
    assert stats["clipped_steps"] >= len(REAL.late_clips)
    assert synchronous[0].stats["buckets_speculated"] == 0


def test_plain_fsdp2_with_torchs_own_optimizer_is_as_close(tolerance: Tolerance) -> None:
    """The tolerance is not one that only we could meet."""
    assert stray(train(2, REAL, "plain-fsdp2", "never")[0], tolerance) == []


def mutated(setup: Setup, fault: str) -> Curve:
    """In a rank."""
    with ExitStack() as stack:

        def planting(*arguments: Any) -> Engine:
            engine = make_engine(*arguments)
            stack.enter_context(planted(fault, engine))
            return engine

        stack.enter_context(mock.patch(f"{run.__module__}.make_engine", planting))
        return run(setup, "fsdp2", "always")


def planted(fault: str, engine: Engine) -> AbstractContextManager[None]:
    trained: Any = engine
    if fault == "reduce_early":
        trained.reduces = lambda micro, count: micro + 2 == count
    if fault == "stale_parameters":
        trained.model.set_reshard_after_backward(False)
    if fault == "swap_shards":
        fault = "swap_transformer_shards"
    context: AbstractContextManager[None] = FAULTS[fault](engine.optimizer, FAULT_STEP, 1)
    return context


@pytest.fixture(scope="module")
def clean() -> list[Curve]:
    return train(2, SHARP, "fsdp2", "never")


@pytest.mark.parametrize("fault", ["skip_publish", "apply_twice", "drop_clip", "swap_shards", *IN_THE_LOOP])
def test_a_planted_fault_is_caught(fault: str, sharp_tolerance: Tolerance, clean: list[Curve]) -> None:
    """By both halves of the suite, with the rank checks off. What those find: tests/distributed/test_rank_checks.py."""
    curves: list[Curve] = pool(2).run(mutated, SHARP, fault)
    assert [curve.error for curve in curves] == ["", ""]
    assert unequal(curves, clean), "not equal to the synchronous run"
    problems = stray(curves[0], sharp_tolerance)
    assert problems, "within the tolerance of one process"


def test_without_a_fault_nothing_is_caught(sharp_tolerance: Tolerance, clean: list[Curve]) -> None:
    curves: list[Curve] = pool(2).run(mutated, SHARP, "none")
    assert unequal(curves, clean) == [] and stray(curves[0], sharp_tolerance) == []
    # Sharp enough to mean something: a step is 2e-3 long, the tolerance at the end is far below.
    assert SAFETY * sharp_tolerance.loss_spread[-1] < 2e-3
    assert max(sharp_tolerance.weight_spread.values()) < 1e-3


def test_unknown_engines_are_refused() -> None:
    assert {"single", "fsdp2", "ddp"} <= set(ENGINES)
    with pytest.raises(ArgumentError, match="engine=zero: expected one of single"):
        run(SHARP, "zero", "never")


def test_engines_that_are_not_installed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("superoffload.tools.convergence.engines.find_spec", lambda name: None)
    with pytest.raises(ArgumentError, match="engine=deepspeed: deepspeed is not installed; pip install deepspeed=="):
        run(SHARP, "deepspeed", "never")


def test_a_batch_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ArgumentError, match="not divisible by 3 ranks"):
        REAL.rows(0, 3)
