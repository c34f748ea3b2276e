"""Measures what it costs ranks to know who owns what: when optimizers are made, and in each step.

The same model is trained with ``fully_shard`` alone and on meshes, in turn. Whole steps differ for other reasons (what
tensor parallelism, a pipeline or experts communicate), so the exchange before the verdict is timed inside of them:
its time on the clock, most of which a rank waits for slower ones, and its processor time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from benchmarks.timing import in_turn
from benchmarks.training.config import ModelConfig

ENGINES = {"fully_shard alone": "fsdp2", "tensor parallelism": "tp", "pipeline stages": "pp", "experts": "ep"}
PARTS = ("made", "told", "told_cpu", "step", "exchange", "exchange_cpu")
_WARM_UP = 4  # the first three steps are checked in full
_MICRO_BATCHES = 2  # as many as the pipeline has stages


@dataclass(frozen=True)
class Workload:
    """Has ``rows`` of ``model.sequence`` tokens in a step for each rank with rows of its own. ``rounds`` optimizers are
    made on each mesh, and take ``steps`` steps each that count."""

    model: ModelConfig
    rows: int = 2
    rounds: int = 5
    steps: int = 6


def run_meshes(workload: Workload, ranks: int) -> list[dict[str, Any]]:
    """Returns a row per mesh; of each optimizer and each step the slowest rank counts."""
    from tests.convergence.local_ranks import LocalRanks
    from tests.convergence.meshes import check_pairs

    for engine in ENGINES.values():
        check_pairs(engine, ranks)
    with LocalRanks(ranks) as local:
        measured = local.run(measure_rank, workload, limit=1500.0)
    return [_row(name, ranks, workload, [rank[name] for rank in measured]) for name in ENGINES]


def _row(name: str, ranks: int, workload: Workload, of_ranks: list[_Found]) -> dict[str, Any]:
    slowest = {
        part: [max(values) for values in zip(*(found.seconds[part] for found in of_ranks), strict=True)]
        for part in PARTS
    }
    return {
        "name": name,
        "ranks": ranks,
        "parameters": max(found.parameters for found in of_ranks),
        "tokens": workload.rows * workload.model.sequence,
        "optimizers": len(slowest["made"]),
        "steps": len(slowest["step"]),
        **{f"{part}_seconds_median": statistics.median(times) for part, times in slowest.items()},
        **{f"{part}_seconds_min": min(times) for part, times in slowest.items()},
    }


class _Found:
    """Collects a rank's times on one mesh."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {part: [] for part in PARTS}
        self.parameters = 0

    def add(self, **seconds: float) -> None:
        for part, value in seconds.items():
            self.seconds[part].append(value)

    def count(self, parameters: int) -> None:
        self.parameters = parameters


class _Clock:
    """Adds up the time that methods take: on the clock, and of this thread's processor."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def reset(self) -> None:
        self.wall = self.cpu = 0.0

    @contextmanager
    def around(self, owner: type, *methods: str) -> Iterator[None]:
        """Times calls of ``methods`` of ``owner``'s objects."""
        with ExitStack() as stack:
            for name in methods:
                stack.enter_context(mock.patch.object(owner, name, self._timed(getattr(owner, name))))
            yield

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.wall += time.perf_counter() - wall
                self.cpu += time.thread_time() - cpu

        return timed


def measure_rank(workload: Workload) -> dict[str, _Found]:
    """Measures in a rank; meshes take turns, so that a busy moment of the machine hits all of them."""
    found = {name: _Found() for name in ENGINES}
    for name in ENGINES:  # groups of ranks, and connections, are made once
        _turn(name, workload, _Found(), steps=0)
    for turn in range(workload.rounds):
        for name in in_turn(tuple(ENGINES), turn):
            _turn(name, workload, found[name], steps=workload.steps)
    return found


def _turn(name: str, workload: Workload, found: _Found, *, steps: int) -> None:
    """Makes an optimizer and takes steps with it."""
    from superoffload.distributed.session import RankSession
    from tests.convergence.engines import BaseEngine, make_engine, setup_for

    made, told, exchanged = _Clock(), _Clock(), _Clock()
    with made.around(BaseEngine, "make_optimizer"), told.around(RankSession, "add"):
        engine = make_engine(ENGINES[name], setup_for(ENGINES[name], _setup(workload)), "always")
    found.add(made=made.wall, told=told.wall, told_cpu=told.cpu)
    found.count(len(engine.optimizer.param_groups[0]["params"]))
    with exchanged.around(RankSession, "start", "finish"):
        for step in range(_WARM_UP + steps):
            seconds = _seconds_of_step(engine, _tokens(workload, engine, step), exchanged)
            if step >= _WARM_UP:
                found.add(step=seconds, exchange=exchanged.wall, exchange_cpu=exchanged.cpu)
    engine.close()


def _setup(workload: Workload) -> Any:
    import torch.distributed as dist

    from tests.convergence.meshes import PAIR
    from tests.convergence.setup import Setup

    batch = workload.rows * dist.get_world_size() // PAIR  # a pipeline must know it beforehand
    return Setup(model=workload.model, batch=batch, micro_batches=_MICRO_BATCHES, bucket_numel=1 << 18)


def _tokens(workload: Workload, engine: Any, step: int) -> Any:
    import torch

    shape = (workload.rows, workload.model.sequence + 1)
    generator = torch.Generator().manual_seed(1000 * step + engine.share[0])
    return torch.randint(0, workload.model.vocabulary, shape, generator=generator).chunk(_MICRO_BATCHES)


def _seconds_of_step(engine: Any, tokens: Any, exchanged: _Clock) -> float:
    import torch.distributed as dist

    dist.barrier()
    exchanged.reset()
    began = time.perf_counter()
    engine.optimizer.zero_grad()
    engine.backward(tokens, 1.0)
    engine.optimizer.step()
    return time.perf_counter() - began
