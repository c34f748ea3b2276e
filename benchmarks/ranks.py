"""Measures what the rank checks cost: the same training with ``rank_check`` off, light and full, in turn.

The differences between whole steps drown in noise, so it times the checks' own work inside the step too: comparing the
other ranks' packets, and the probe of what was published. The exchange itself is the verdict's, happens without checks
too, and is shown apart. So is noticing users' edits of DTensors, which reads gradients and parameters again.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks import command
from benchmarks.timing import in_turn
from benchmarks.training.config import ModelConfig
from tests.convergence.local_ranks import LocalRanks

OFF, LIGHT, FULL = "off", "light", "full"
CONTESTANTS = (OFF, LIGHT, FULL)
PARTS = ("step", "check", "exchange", "notice")
_WARM_UP = 4  # the first three steps are checked in full, whatever the option


@dataclass(frozen=True)
class Workload:
    """Has ``rows`` of ``model.sequence`` tokens per rank and step; a contestant trains ``rounds`` x ``steps`` steps."""

    model: ModelConfig
    rows: int
    rounds: int
    steps: int


def make_parser() -> argparse.ArgumentParser:
    parser = command.parser(
        "ranks",
        "Trains a sharded model (FSDP2, gloo, this machine's processors) with rank_check off, light and full in turn, "
        "and times the checks inside the steps. The smaller --rows, the shorter a step and the larger the share of the "
        "checks.",
        plot=False,
    )
    command.add_option(parser, "--ranks", type=int, default=2, help="processes on this machine")
    command.add_option(parser, "--hidden", type=int, default=512, help="width of the model")
    command.add_option(parser, "--layers", type=int, default=4, help="of the model")
    command.add_option(parser, "--rows", type=int, default=4, help="of 64 tokens, per rank and step")
    command.add_option(parser, "--rounds", type=int, default=6, help="turns of each option")
    command.add_option(parser, "--steps", type=int, default=4, help="per turn")
    return parser


def run(args: argparse.Namespace) -> dict[str, Any]:
    command.positive(args, "ranks", "hidden", "layers", "rows", "rounds", "steps")
    if args.quick:
        args.hidden, args.layers, args.rows, args.rounds, args.steps = 64, 1, 2, 1, 1
    mlp = int(args.hidden * 2.6875)
    model = ModelConfig(layers=args.layers, hidden=args.hidden, heads=8, kv_heads=4, mlp=mlp, sequence=64)
    workload = Workload(model, args.rows, args.rounds, args.steps)
    with LocalRanks(args.ranks) as local:
        measured = local.run(measure_rank, workload, limit=550.0)
    rows: list[dict[str, Any]] = []
    for name in CONTESTANTS:
        # Per step the slowest rank counts.
        parts = {part: list(map(max, zip(*(rank[name][part] for rank in measured), strict=True))) for part in PARTS}
        medians = {part: statistics.median(seconds) for part, seconds in parts.items()}
        step = medians["step"]
        row = {
            "name": name,
            "ranks": args.ranks,
            "isa": measured[0]["isa"],
            "threads": 1,
            "dtype": "bf16",
            "numel": measured[0]["numel"],
            "tokens": args.rows * model.sequence,
            "steps": len(parts["step"]),
            "seconds_median": step,
            "seconds_min": min(parts["step"]),
            "check_seconds_median": medians["check"],
            "check_seconds_max": max(parts["check"]),
            "exchange_seconds_median": medians["exchange"],
            "of_step": medians["check"] / step,
            "notice_seconds_median": medians["notice"],
            "notice_of_step": medians["notice"] / step,
            "ratio_to": OFF,
            "ratio": step / (rows[0]["seconds_median"] if rows else step),
        }
        rows.append(row)
        print(
            f"rank_check={name:5}  step {1e3 * step:8.1f} ms (x {row['ratio']:.3f})  "
            f"checks {1e3 * medians['check']:7.3f} ms ({row['of_step']:6.2%} of the step)  "
            f"exchange {1e3 * medians['exchange']:7.3f} ms  "
            f"noticing edits {1e3 * medians['notice']:7.3f} ms ({row['notice_of_step']:6.2%})"
        )
    return {"rows": rows}


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

        setup = Setup(model=workload.model, dtype="bf16", rank_check=check, bucket_numel=1 << 18, micro_batches=1)
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


if __name__ == "__main__":
    raise SystemExit(command.start(make_parser(), run))
