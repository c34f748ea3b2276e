"""What schedules of ``torch.distributed.pipelining`` do to gradients after the optimizer has taken them."""

from __future__ import annotations

from typing import Any
from unittest import mock

from torch import Tensor

from tests.convergence import pipeline_stages
from tests.convergence.compare import unequal
from tests.convergence.distributed_run import Curve, run
from tests.convergence.pipeline_stages import PipelineStages
from tests.convergence.setup import Setup
from tests.support.rank_processes import pool

SHORT = Setup(steps=12, nan_step=7, inf_step=9, late_clips=(8, 11), digest_every=3)


class Dividing(PipelineStages):
    """Leaves it to the schedule to divide by the number of micro-batches, as is its default."""

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return super()._loss(logits, targets) * self.setup.micro_batches

    def _make_schedule(self) -> Any:
        schedule = super()._make_schedule()
        schedule.scale_grads = True
        return schedule


def run_dividing(setup: Setup, speculation: str) -> Curve:
    with mock.patch.object(pipeline_stages, "PipelineStages", Dividing):
        return run(setup, "pp", speculation)


def test_gradients_that_the_schedule_divides_are_taken_as_they_are_at_step() -> None:
    ranks = pool(2)
    divided: list[Curve] = ranks.run(run_dividing, SHORT, "always")
    assert unequal(divided, ranks.run(run_dividing, SHORT, "never")) == []
    # Two micro-batches: dividing by 2 rounds nothing, so it does not matter when that is done.
    plain: list[Curve] = ranks.run(run, SHORT, "pp", "never")
    assert [curve.digests for curve in divided] == [curve.digests for curve in plain]
    assert divided[0].stats["buckets_undone"] > 0
