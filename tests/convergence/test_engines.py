"""Several ranks converge as one process does, and a fault that would stop them is noticed: 80 real steps."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from superoffload.errors import ArgumentError, SuperOffloadError
from tests.convergence.compare import SAFETY, Tolerance, stray, tolerance_of, unequal
from tests.convergence.distributed_run import Curve, run
from tests.convergence.engines import ENGINES, setup_for
from tests.convergence.faulty_runs import mutated
from tests.convergence.local_ranks import LocalRanks
from tests.convergence.setup import Setup
from tests.convergence.suite import single_runs
from tests.support.rank_faults import IN_THE_LOOP
from tests.support.rank_processes import pool, side_by_side

pytestmark = pytest.mark.convergence


def in_turn(engine: str, *more: object) -> Any:
    """A case of an engine. Those of FSDP2 run every time; those of another engine have their baselines in common."""
    marks = () if engine == "fsdp2" else pytest.mark.in_turn(f"convergence of {engine}")
    return pytest.param(engine, *more, marks=marks)


# Long after the last trouble and the last late clip, and long enough to learn; the command trains for 200 steps.
REAL = Setup(steps=80)
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


@cache
def tolerance_for(setup: Setup) -> Tolerance:
    with LocalRanks(2, init=False) as ranks:
        return tolerance_of(single_runs(setup, ranks, print))


def train(count: int, setup: Setup, engine: str, speculation: str) -> list[Curve]:
    curves: list[Curve] = pool(count).run(run, setup, engine, speculation)
    return curves


@pytest.mark.parametrize(
    ("engine", "count"),
    [
        in_turn("ddp", 2),
        in_turn("deepspeed", 2),
        *(in_turn(engine, count) for engine in ("fsdp2", "tp", "pp", "ep") for count in (2, 4)),
    ],
)
def test_ranks_converge_as_one_process(engine: str, count: int) -> None:
    if engine == "deepspeed":
        pytest.importorskip("deepspeed", reason="needs deepspeed: pip install deepspeed==0.19.8")
    real = setup_for(engine, REAL)
    # As many rows in a backward as on two ranks: half the time. A pipeline of two stages needs two micro-batches.
    setup = replace(real, micro_batches=1) if count == 4 and engine != "pp" else real
    calls = [(setup, engine, "always"), (setup, engine, "never")]
    speculative, synchronous = side_by_side(count, run, *calls)
    assert unequal(speculative, synchronous) == []
    assert len(speculative[0].digests) == REAL.steps // REAL.digest_every
    assert stray(speculative[0], tolerance_for(real)) == []
    losses = speculative[0].losses
    learnt = 2.0 if engine == "ep" else 2.5  # nats per byte; with half of the learning rate it is less
    assert sum(losses[-20:]) / 20 < losses[0] - learnt, "it has learnt something"
    assert sum(math.isinf(norm) for norm in speculative[0].norms) == 2, "a NaN and an infinity on one rank"
    stats = speculative[0].stats
    assert stats["skipped_steps"] == 2 and stats["buckets_committed"] > 0 and stats["buckets_replayed"] > 0
    assert stats["clipped_steps"] >= len(REAL.late_clips)
    assert synchronous[0].stats["buckets_speculated"] == 0


def test_plain_fsdp2_with_torchs_own_optimizer_is_as_close() -> None:
    """The tolerance is not one that only we could meet."""
    assert stray(train(2, REAL, "plain-fsdp2", "never")[0], tolerance_for(REAL)) == []


@cache
def clean(engine: str) -> list[Curve]:
    return train(2, setup_for(engine, SHARP), engine, "never")


@pytest.mark.parametrize("fault", ["skip_publish", "apply_twice", "drop_clip", "swap_shards", *IN_THE_LOOP])
def test_a_planted_fault_is_caught(fault: str) -> None:
    """By both halves of the suite, with the rank checks off. What those find: tests/distributed/test_rank_checks.py."""
    _check_caught(fault, "fsdp2")


@pytest.mark.parametrize("fault", ["skip_publish", "apply_twice", "drop_clip"])
@pytest.mark.parametrize("engine", [in_turn("tp"), in_turn("pp"), in_turn("ep")])
def test_a_planted_fault_is_caught_on_a_mesh(engine: str, fault: str) -> None:
    if (engine, fault) == ("ep", "skip_publish"):
        fault = "skip_last_publish"  # the first bucket is of an expert that gets no token: it changes no loss
    _check_caught(fault, engine)


def _check_caught(fault: str, engine: str) -> None:
    setup = setup_for(engine, SHARP)
    curves: list[Curve] = pool(2).run(mutated, setup, fault, engine)
    assert [curve.error for curve in curves] == ["", ""]
    assert unequal(curves, clean(engine)), "not equal to the synchronous run"
    assert stray(curves[0], tolerance_for(setup)), "within the tolerance of one process"


@pytest.mark.parametrize("engine", [in_turn("fsdp2"), in_turn("tp"), in_turn("pp"), in_turn("ep")])
def test_without_a_fault_nothing_is_caught(engine: str) -> None:
    setup = setup_for(engine, SHARP)
    tolerance = tolerance_for(setup)
    curves: list[Curve] = pool(2).run(mutated, setup, "none", engine)
    assert unequal(curves, clean(engine)) == [] and stray(curves[0], tolerance) == []
    # Sharp enough to mean something: a step is 2e-3 long, the tolerance at the end is far below.
    assert SAFETY * tolerance.loss_spread[-1] < 2e-3
    assert max(tolerance.weight_spread.values()) < 1e-3


def test_unknown_engines_are_refused() -> None:
    assert {"single", "fsdp2", "ddp"} <= set(ENGINES)
    with pytest.raises(ArgumentError, match="engine=zero: expected one of single"):
        run(SHARP, "zero", "never")


def test_engines_that_are_not_installed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.convergence.engines.find_spec", lambda name: None)
    with pytest.raises(ArgumentError, match="engine=deepspeed: deepspeed is not installed; pip install deepspeed=="):
        run(SHARP, "deepspeed", "never")
    with pytest.raises(ArgumentError, match="engine=titan: torchtitan is not installed; pip install --no-deps -r req"):
        run(SHARP, "titan", "never")


def test_a_batch_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ArgumentError, match="not divisible by 3 ranks"):
        REAL.rows(0, 3)


def test_a_reference_that_failed_is_an_error() -> None:
    runs = [Curve("never") for _ in range(6)]
    runs[3].fail("step 4: RuntimeError: Loss is not finite")
    with pytest.raises(SuperOffloadError, match="AdamW, which all else is compared with, has failed: step 4: Runt"):
        tolerance_of(runs, "torchtitan's AdamW")
