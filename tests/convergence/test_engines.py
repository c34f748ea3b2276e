"""Several ranks converge as one process does, or as torchtitan's own AdamW; faults that would stop them are noticed."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from tests.convergence.compare import stray, unequal
from tests.convergence.distributed_run import Curve
from tests.convergence.engines import setup_for
from tests.convergence.local_ranks import LocalRanks
from tests.convergence.setup import Setup
from tests.convergence.short_runs import SHORT, mutated
from tests.convergence.suite import Result, compare, single_runs, stock_runs
from tests.support.optional_packages import needs
from tests.support.rank_faults import IN_THE_LOOP
from tests.support.rank_processes import pool

pytestmark = pytest.mark.convergence

# How many ranks each trains on; of four, two share a matrix or the experts, and fully_shard has two of these pairs.
# DDP: test_command.py.
RANKS = {"fsdp2": 2, "deepspeed": 2, "zero2": 2, "pp": 2, "tp": 4, "ep": 4, "titan": 2}


def in_turn(engine: str, *more: object) -> Any:
    """A case of an engine. Those of FSDP2 run every time; those of another engine have their runs in common."""
    marks = [] if engine == "fsdp2" else [pytest.mark.in_turn(f"convergence of {engine}")]
    package = {"titan": "torchtitan", "deepspeed": "deepspeed", "zero2": "deepspeed"}.get(engine)
    marks += [needs(package)] if package else []
    return pytest.param(engine, *more, marks=marks)


def ranks_of(engine: str) -> LocalRanks:
    """Torchtitan changes much of the processes that it trains in."""
    return pool(RANKS[engine], engine if engine == "titan" else "")


@cache
def runs_of_one_process(setup: Setup) -> list[Curve]:
    return single_runs(setup, pool(2), print)


def setup_of(engine: str) -> Setup:
    # Our own model's norms are larger than those of torchtitan's.
    return SHORT if engine == "titan" else setup_for(engine, replace(SHORT, max_grad_norm=2.5))


@cache
def compared(engine: str, dtype: str = "") -> Result:
    """Tests of an engine share it."""
    setup = setup_of(engine)
    setup = replace(setup, dtype=dtype or setup.dtype)
    ranks = ranks_of(engine)
    references = stock_runs(setup, ranks, print) if engine == "titan" else runs_of_one_process(setup)
    return compare(setup, engine, ranks, references, print)


@pytest.mark.parametrize("engine", [in_turn(engine) for engine in RANKS])
def test_ranks_converge_as_one_process(engine: str) -> None:
    """Also with delivery on demand, and FSDP2 with torch's own AdamW: the tolerance is not one that only we meet."""
    result = compared(engine)
    assert result.verified, (result.problems, result.inconclusive)
    speculative, tolerance = result.curves["speculative"], result.tolerance
    assert len(speculative.digests) == SHORT.steps // SHORT.digest_every
    assert sum(math.isinf(norm) for norm in speculative.norms) == 2, "a NaN and an infinity on one rank"
    assert speculative.stats["skipped_steps"] == 2 and speculative.stats["steps"] == SHORT.steps - 2
    assert speculative.stats["clipped_steps"] >= len(SHORT.late_clips)
    assert result.curves["synchronous"].stats["buckets_speculated"] == 0
    # Sharp enough to mean something: a step is 2e-3 long, the tolerance at the end is far below.
    assert tolerance is not None and tolerance.describe()["loss_at_the_end"] < 1e-3
    assert engine == "titan" or max(tolerance.weight_spread.values()) < 1e-3
    if engine == "titan":
        stock, name = result.curves["torchtitan's AdamW"].weights, "tok_embeddings.weight"
        assert not torch.equal(speculative.weights[name], stock[name]), "another optimizer rounds otherwise"
        assert speculative.losses[-1] < speculative.losses[0] - 0.3
        above = [step for step, norm in enumerate(speculative.norms, 1) if SHORT.max_grad_norm < norm < math.inf]
        assert speculative.stats["clipped_steps"] == len({*above, *SHORT.late_clips}) > len(above), "the late clips too"


@pytest.mark.in_turn
def test_ranks_converge_in_bf16_too() -> None:
    """There the order of summation counts."""
    result = compared("fsdp2", "bf16")
    assert result.verified, (result.problems, result.inconclusive)


@pytest.mark.parametrize(
    ("engine", "fault"),
    [
        *(("fsdp2", fault) for fault in ("skip_publish", "apply_twice", "drop_clip", "swap_shards", *IN_THE_LOOP)),
        in_turn("tp", "skip_publish"),
        in_turn("pp", "apply_twice"),
        in_turn("zero2", "skip_publish"),
        in_turn("zero2", "apply_twice"),
        in_turn("zero2", "drop_clip"),
        in_turn("ep", "drop_clip"),
        *(in_turn("titan", fault) for fault in ("skip_publish", "apply_twice", "drop_clip")),
    ],
)
def test_a_planted_fault_is_caught(engine: str, fault: str) -> None:
    """By both halves of the suite, with the rank checks off. What those find: tests/distributed/test_rank_checks.py."""
    result = compared(engine)
    curves: list[Curve] = ranks_of(engine).run(mutated, setup_of(engine), fault, engine)
    assert [curve.error for curve in curves] == [""] * RANKS[engine] and result.tolerance is not None
    found = unequal(curves, result.of_ranks["never"]), stray(curves[0], result.tolerance)
    assert all(found), found
