"""Engine titan: torchtitan's Trainer with our AdamW, against itself and torchtitan's AdamW."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from tests.convergence.compare import stray, unequal
from tests.convergence.distributed_run import Curve
from tests.convergence.local_ranks import LocalRanks
from tests.convergence.short_runs import SHORT, mutated
from tests.convergence.suite import Result, compare, stock_runs
from tests.support.optional_packages import needs

pytestmark = [needs("torchtitan"), pytest.mark.convergence, pytest.mark.in_turn("verify titan")]

STOCK = "torchtitan's AdamW"


@pytest.fixture(scope="module")
def two() -> Iterator[LocalRanks]:
    with LocalRanks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def result(two: LocalRanks) -> Result:
    return compare(SHORT, "titan", two, stock_runs(SHORT, two, print), print)


def test_two_ranks(result: Result) -> None:
    assert result.verified, (result.problems, result.inconclusive)
    assert set(result.curves) == {STOCK, "speculative", "synchronous"}
    assert result.compared_digests == 2 * 4 * 4
    speculative, tolerance = result.curves["speculative"], result.tolerance
    assert speculative.losses[-1] < speculative.losses[0] - 0.3
    stock, name = result.curves[STOCK].weights, "tok_embeddings.weight"
    assert not torch.equal(speculative.weights[name], stock[name]), "another optimizer rounds otherwise"
    assert speculative.stats["skipped_steps"] == 2 and speculative.stats["steps"] == 14
    above = [step for step, norm in enumerate(speculative.norms, 1) if SHORT.max_grad_norm < norm < math.inf]
    assert speculative.stats["clipped_steps"] == len({*above, *SHORT.late_clips}) > len(above), "the late clips too"
    # Sharp enough to mean something: a step is 2e-3 long.
    assert tolerance is not None and tolerance.describe()["loss_at_the_end"] < 1e-3


@pytest.mark.parametrize("fault", ["skip_publish", "apply_twice", "drop_clip"])
def test_a_planted_fault_is_caught(fault: str, two: LocalRanks, result: Result) -> None:
    """By both halves of the comparison, with the rank checks off."""
    curves: list[Curve] = two.run(mutated, SHORT, fault, "titan")
    assert [curve.error for curve in curves] == ["", ""]
    assert unequal(curves, result.of_ranks["never"]), "not equal to the synchronous run"
    assert result.tolerance is not None
    assert stray(curves[0], result.tolerance), "within the tolerance of torchtitan's AdamW"
