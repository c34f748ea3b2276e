"""Short runs for tests: of `python -m tests.convergence`, with the arguments of the command line and ``SHORT``; and of
ranks in which a fault of ``rank_faults`` is planted."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

from tests.convergence.__main__ import leave, main
from tests.convergence.distributed_run import Curve, run
from tests.convergence.engines import make_engine
from tests.convergence.setup import Setup
from tests.support.rank_faults import FAULTS

# Some steps are clipped, some are not. In fp32 the order of summation changes next to nothing.
SHORT = Setup(
    steps=16, dtype="fp32", max_grad_norm=1.5, warmup=4, nan_step=4, inf_step=7, late_clips=(9, 14), digest_every=4,
    rank_check="off",
)  # fmt: skip
FAULT_STEP = 12


def mutated(setup: Setup, fault: str, name: str) -> Curve:
    """In a rank."""
    with ExitStack() as stack:

        def planting(*arguments: Any) -> Any:
            engine: Any = make_engine(*arguments)
            if fault == "reduce_early":
                engine.reduces = lambda micro, count: micro + 2 == count
            if fault == "stale_parameters":
                engine.model.set_reshard_after_backward(False)
            planted = FAULTS["swap_transformer_shards" if fault == "swap_shards" else fault]
            stack.enter_context(planted(engine.optimizer, FAULT_STEP, 1))
            return engine

        stack.enter_context(mock.patch(f"{run.__module__}.make_engine", planting))
        return run(setup, name, "always")


if __name__ == "__main__":
    # Our own model's norms are larger than those of torchtitan's.
    short = SHORT if "titan" in sys.argv else replace(SHORT, max_grad_norm=2.5)
    with mock.patch.object(Setup, "for_ranks", lambda given, count: short):
        leave(main())
