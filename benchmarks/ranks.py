"""Measures what the rank checks cost: the same training with ``rank_check`` off, light and full, in turn.

The differences between whole steps drown in noise, so it times the checks' own work inside the step too: comparing the
other ranks' packets, and the probe of what was published.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import command
from benchmarks.timing import Stopwatch, in_turn
from benchmarks.training.config import ModelConfig
from superoffload import kernels
from tests.convergence.local_ranks import LocalRanks

CONTESTANTS = ("off", "light", "full")
_RANKS = 2
_WARM_UP = 4  # the first three steps are checked in full, whatever the option


def make_parser() -> argparse.ArgumentParser:
    return command.parser(
        "ranks",
        "Trains a sharded model (FSDP2, gloo, two ranks on this machine's processors) with rank_check off, light and "
        "full in turn, and times the checks inside the steps. The fewer tokens, the larger the share of the checks.",
        plot=False,
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    hidden, layers, sequences, rounds, turn = (64, 1, 2, 1, 1) if args.quick else (512, 4, 4, 6, 4)
    mlp = int(hidden * 2.6875)
    model = ModelConfig(layers=layers, hidden=hidden, heads=8, kv_heads=4, mlp=mlp, sequence=64)
    with LocalRanks(_RANKS) as local:
        measured = local.run(measure_rank, model, sequences, rounds, turn, limit=550.0)
    rows: list[dict[str, Any]] = []
    for name in CONTESTANTS:
        # Per step the slowest rank counts.
        steps, checks = (
            list(map(max, zip(*each, strict=True))) for each in zip(*(rank[name] for rank in measured), strict=True)
        )
        step, check = statistics.median(steps), statistics.median(checks)
        row = {
            "name": name,
            "ranks": _RANKS,
            "isa": kernels.current_isa(),
            "threads": 1,
            "dtype": "bf16",
            "numel": measured[0]["numel"],
            "tokens": sequences * model.sequence,
            "steps": len(steps),
            "seconds_median": step,
            "seconds_min": min(steps),
            "check_seconds_median": check,
            "check_seconds_max": max(checks),
            "of_step": check / step,
            "ratio_to": CONTESTANTS[0],
            "ratio": step / (rows[0]["seconds_median"] if rows else step),
        }
        rows.append(row)
        print(
            f"rank_check={name:5}  step {1e3 * step:8.1f} ms (x {row['ratio']:.3f})  "
            f"checks {1e3 * check:7.3f} ms ({row['of_step']:6.2%} of the step)"
        )
    return {"rows": rows}


def measure_rank(model: ModelConfig, rows: int, rounds: int, steps: int) -> dict[str, Any]:
    """Measures in a rank; contestants take turns, so that a busy moment of the machine hits all of them."""
    entrants = {name: _Entrant(name, model, rows) for name in CONTESTANTS}
    for entrant in entrants.values():
        entrant.turn(_WARM_UP, counts=False)
    for turn in range(rounds):
        for name in in_turn(CONTESTANTS, turn):
            entrants[name].turn(steps, counts=True)
    found: dict[str, Any] = {name: (entrant.steps, entrant.checks) for name, entrant in entrants.items()}
    for entrant in entrants.values():
        entrant.engine.close()
    return {**found, "numel": sum(param.numel() for param in entrants["off"].engine.model.parameters())}


class _Entrant:
    """Trains one FSDP2 model on ``rows`` sequences per rank and step, with a clock around the checks."""

    def __init__(self, check: str, model: ModelConfig, rows: int) -> None:
        from tests.convergence.engines import Fsdp2
        from tests.convergence.setup import Setup

        setup = Setup(model=model, dtype="bf16", rank_check=check, bucket_numel=1 << 18, micro_batches=1)
        self._shape = rows, model.sequence + 1
        self.engine = Fsdp2(setup, "always")
        self.steps: list[float] = []
        self.checks: list[float] = []
        self._check, self._step = Stopwatch(), 0
        self._check.wrap(self.engine.optimizer._ranks.session, "_compare", "ended")

    def turn(self, steps: int, *, counts: bool) -> None:
        for _ in range(steps):
            self._step += 1
            seed = 1000 * self._step + dist.get_rank()
            tokens = torch.randint(0, 256, self._shape, generator=torch.Generator().manual_seed(seed))
            dist.barrier()
            self._check.seconds, began = 0.0, time.perf_counter()
            self.engine.optimizer.zero_grad()
            self.engine.backward([tokens], 1.0)
            self.engine.optimizer.step()
            if counts:
                self.steps.append(time.perf_counter() - began)
                self.checks.append(self._check.seconds)


if __name__ == "__main__":
    raise SystemExit(command.start(make_parser(), run))
