"""Measures what the rank checks cost: the same training with ``rank_check`` off, light and full, in turn.

The differences between whole steps drown in noise, so it times the checks' own work inside the step too: comparing the
other ranks' packets, and the probe of what was published. The exchange itself is the verdict's, happens without checks
too, and is shown apart. So is noticing users' edits of DTensors, which reads gradients and parameters again.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.timing import in_turn
from benchmarks.training.config import ModelConfig

OFF, LIGHT, FULL = "off", "light", "full"
CONTESTANTS = (OFF, LIGHT, FULL)
PARTS = ("step", "check", "exchange", "notice")
PROMISE = 0.01  # of a step, for light
_WARM_UP = 4  # the first three steps are checked in full, whatever the option


@dataclass(frozen=True)
class Workload:
    """Has ``rows`` of ``model.sequence`` tokens per rank and step; a contestant trains ``rounds`` x ``steps`` steps."""

    model: ModelConfig
    rows: int = 4
    rounds: int = 6
    steps: int = 4
    threads: int = 1
    dtype: str = "bf16"


def run_ranks(workload: Workload, ranks: int) -> list[dict[str, Any]]:
    """Returns a row per contestant; per step the slowest rank counts."""
    from tests.convergence.local_ranks import LocalRanks

    with LocalRanks(ranks) as local:
        measured = local.run(measure_rank, workload, limit=550.0)
    rows: list[dict[str, Any]] = []
    for name in CONTESTANTS:
        times = {part: _slowest([rank[name][part] for rank in measured]) for part in PARTS}
        base = rows[0]["seconds_median"] if rows else statistics.median(times["step"])
        rows.append(_row(name, ranks, workload, measured[0], times, base))
    return rows


def _slowest(of_ranks: list[list[float]]) -> list[float]:
    return [max(values) for values in zip(*of_ranks, strict=True)]


def _row(
    name: str, ranks: int, workload: Workload, first: dict[str, Any], times: dict[str, list[float]], base: float
) -> dict[str, Any]:
    step, check = statistics.median(times["step"]), statistics.median(times["check"])
    return {
        "name": name,
        "ranks": ranks,
        "isa": first["isa"],
        "threads": workload.threads,
        "numel": first["numel"],
        "tokens": workload.rows * workload.model.sequence,
        "steps": len(times["step"]),
        "seconds_median": step,
        "seconds_min": min(times["step"]),
        "check_seconds_median": check,
        "check_seconds_max": max(times["check"]),
        "exchange_seconds_median": statistics.median(times["exchange"]),
        "of_step": check / step,
        "notice_seconds_median": statistics.median(times["notice"]),
        "notice_of_step": statistics.median(times["notice"]) / step,
        "bytes_per_param": None,
        "gb_per_s": None,
        "of_limit": None,
        "ratio_to": OFF,
        "ratio": step / base,
    }


def measure_rank(workload: Workload) -> dict[str, Any]:
    """Measures in a rank; contestants take turns, so that a busy moment of the machine hits all of them."""
    from superoffload import kernels

    entrants = {name: _Entrant(name, workload) for name in CONTESTANTS}
    for entrant in entrants.values():
        entrant.turn(_WARM_UP, counts=False)
    for turn in range(workload.rounds):
        for name in in_turn(CONTESTANTS, turn):
            entrants[name].turn(workload.steps, counts=True)
    found: dict[str, Any] = {name: entrant.times for name, entrant in entrants.items()}
    numel = sum(param.numel() for param in entrants[OFF].engine.model.parameters())
    for entrant in entrants.values():
        entrant.engine.close()
    return {**found, "isa": kernels.current_isa(), "numel": numel}


class _Entrant:
    """Trains one FSDP2 model, with clocks around the checks."""

    def __init__(self, check: str, workload: Workload) -> None:
        from tests.convergence.engines import Fsdp2
        from tests.convergence.setup import Setup

        setup = Setup(
            model=workload.model, dtype=workload.dtype, rank_check=check, bucket_numel=1 << 18, micro_batches=1
        )
        self.workload = workload
        self.engine = Fsdp2(setup, "always")
        self.times: dict[str, list[float]] = {part: [] for part in PARTS}
        self._now = dict.fromkeys(PARTS[1:], 0.0)
        self._step = 0
        session = self.engine.optimizer._ranks.session
        for method, part in (("_compare", "check"), ("ended", "check"), ("start", "exchange"), ("_take", "exchange")):
            setattr(session, method, self._timed(getattr(session, method), part))
        engine = self.engine.optimizer._engine
        engine.packer.gradient_is = self._timed(engine.packer.gradient_is, "notice")
        bits = engine.link.bit_sums
        for method in ("of", "changed"):
            setattr(bits, method, self._timed(getattr(bits, method), "notice"))

    def _timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._now[part] += time.perf_counter() - began

        return timed

    def turn(self, steps: int, *, counts: bool) -> None:
        import torch
        import torch.distributed as dist

        model = self.workload.model
        for _ in range(steps):
            self._step += 1
            seed = 1000 * self._step + dist.get_rank()
            shape = (self.workload.rows, model.sequence + 1)
            tokens = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))
            dist.barrier()
            self._now = dict.fromkeys(self._now, 0.0)
            began = time.perf_counter()
            self.engine.optimizer.zero_grad()
            self.engine.backward([tokens], 1.0)
            self.engine.optimizer.step()
            if counts:
                self.times["step"].append(time.perf_counter() - began)
                for part, seconds in self._now.items():
                    self.times[part].append(seconds)
