"""Runs of several ranks in which a fault of ``rank_faults`` is planted."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest import mock

from tests.convergence.distributed_run import Curve, run
from tests.convergence.engines import BaseEngine, make_engine
from tests.convergence.setup import Setup
from tests.support.rank_faults import FAULTS

FAULT_STEP = 12


def mutated(setup: Setup, fault: str, engine: str = "fsdp2") -> Curve:
    """In a rank."""
    with ExitStack() as stack:

        def planting(*arguments: Any) -> BaseEngine:
            engine = make_engine(*arguments)
            stack.enter_context(planted(fault, engine))
            return engine

        stack.enter_context(mock.patch(f"{run.__module__}.make_engine", planting))
        return run(setup, engine, "always")


def planted(fault: str, engine: BaseEngine) -> AbstractContextManager[None]:
    trained: Any = engine
    if fault == "reduce_early":
        trained.reduces = lambda micro, count: micro + 2 == count
    if fault == "stale_parameters":
        trained.model.set_reshard_after_backward(False)
    if fault == "swap_shards":
        fault = "swap_transformer_shards"
    context: AbstractContextManager[None] = FAULTS[fault](engine.optimizer, FAULT_STEP, 1)
    return context
