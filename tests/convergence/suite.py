"""Runs the whole comparison for one engine: speculative against synchronous, and both against a reference, which is one
process, or torchtitan with its own AdamW."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tests.convergence.compare import FEWEST_RUNS, ONE_PROCESS, Tolerance, stray, tolerance_of, unequal
from tests.convergence.distributed_run import Curve, run
from tests.convergence.engines import ON_DEMAND
from tests.convergence.local_ranks import LocalRanks
from tests.convergence.setup import Setup

Say = Callable[[str], None]
Ranks = Any  # LocalRanks, LaunchedRanks: ``run()`` calls a function on ``count`` ranks and returns their values
_ON_DEMAND_STEPS = 48


@dataclass
class Result:
    """Holds rank 0's ``curves`` by name, and those ``of_ranks`` by speculation. ``inconclusive``: no problem, but
    something was not compared."""

    curves: dict[str, Curve] = field(default_factory=dict)
    tolerance: Tolerance | None = None
    problems: list[str] = field(default_factory=list)
    inconclusive: str = ""
    compared_digests: int = 0
    of_ranks: dict[str, list[Curve]] = field(default_factory=dict)

    @property
    def verified(self) -> bool:
        return not self.problems and not self.inconclusive


def single_runs(setup: Setup, ranks: Ranks, say: Say) -> list[Curve]:
    """Runs single processes that sum in different orders, spread over the available ranks."""
    curves: list[Curve] = []
    for first in range(0, FEWEST_RUNS + 1, ranks.count):
        curves += filter(None, ranks.run(single_run, setup, first))
        say(f"{len(curves)} of {FEWEST_RUNS + 1} one-process runs done")
    return curves


def single_run(setup: Setup, first: int) -> Curve | None:
    """Trains alone in a rank, while the other ranks train in other orders."""
    order = first + int(os.environ["RANK"])
    return run(setup, "single", "never", order=order) if order <= FEWEST_RUNS else None


def stock_runs(setup: Setup, ranks: Ranks, say: Say) -> list[Curve]:
    """Runs torchtitan's own AdamW on ``ranks``, which sum in another order in each run."""
    curves: list[Curve] = []
    for order in range(FEWEST_RUNS + 1):
        curves.append(ranks.run(partial(run, order=order), setup, "plain-titan", "never")[0])
        say(f"{len(curves)} of {FEWEST_RUNS + 1} runs with torchtitan's AdamW done: loss {_last(curves[-1])}")
    return curves


def delivered_unlike(setup: Setup, engine: str, ranks: Ranks, eager: list[Curve]) -> list[str]:
    """Returns differences between speculation with delivery on demand and synchronous steps with ``eager`` delivery."""
    short = replace(setup, steps=min(setup.steps, _ON_DEMAND_STEPS))
    if short != setup:
        eager = ranks.run(run, short, engine, "never")
    return unequal(ranks.run(run, replace(short, delivery="on_demand"), engine, "always"), eager)


def verify_ranks(setup: Setup, engine: str, count: int, say: Say = print) -> Result:
    """Starts ``count`` ranks on this machine and compares them."""
    setup.rows(0, count)
    singles = None
    if engine != "titan":
        with LocalRanks(max(count, 2), init=False) as alone:
            singles = single_runs(setup, alone, say)
    with LocalRanks(count) as ranks:
        return compare(setup, engine, ranks, singles or stock_runs(setup, ranks, say), say)


def verify_launched(setup: Setup, engine: str, ranks: Ranks, say: Say) -> Result:
    """Compares ranks that are there already; all of them call it."""
    setup.rows(0, ranks.count)
    return compare(setup, engine, ranks, (stock_runs if engine == "titan" else single_runs)(setup, ranks, say), say)


def compare(setup: Setup, engine: str, ranks: Ranks, references: Sequence[Curve], say: Say) -> Result:
    """Compares ranks with each other and with ``references``: several runs of one process, or of torchtitan's AdamW."""
    tolerance = tolerance_of(references, "torchtitan's AdamW" if engine == "titan" else ONE_PROCESS)
    result = Result(tolerance=tolerance)
    result.curves[tolerance.of] = references[0]
    both = result.of_ranks
    for speculation in ("always", "never"):
        both[speculation] = ranks.run(run, setup, engine, speculation)
        say(f"{engine}, {ranks.count} ranks, speculation {speculation}: loss {_last(both[speculation][0])}")
    result.curves["speculative"], result.curves["synchronous"] = both["always"][0], both["never"][0]
    result.problems.extend(unequal(both["always"], both["never"]))
    result.compared_digests = sum(len(parts) for curve in both["always"] for parts in curve.digests.values())
    result.problems.extend([f"{tolerance.of}: {problem}" for problem in stray(both["always"][0], tolerance)])
    if engine == "fsdp2":
        plain = ranks.run(run, setup, "plain-fsdp2", "never")
        say(f"plain FSDP2 with torch.optim.AdamW: loss {_last(plain[0])}")
        result.curves["plain FSDP2, torch AdamW"] = plain[0]
        result.problems.extend([f"plain FSDP2: {problem}" for problem in stray(plain[0], tolerance)])
    if engine in ON_DEMAND:
        problems = delivered_unlike(setup, engine, ranks, both["never"])
        result.problems.extend(f"on demand: {problem}" for problem in problems)
        say("delivery on demand: compared with eager delivery")
    judge_fates(result, setup)
    return result


def judge_fates(result: Result, setup: Setup) -> None:
    """Records a problem, or a gap, if speculated buckets lacked a fate that had to be compared."""
    stats = result.curves["speculative"].stats
    if not stats:
        return
    for fate in ("speculated", "replayed"):
        if not stats[f"buckets_{fate}"]:
            result.problems.append(f"no bucket was {fate}, so that fate was not compared; take more steps")
    if stats["buckets_committed"]:
        return
    if unclipped := stats["steps"] - stats["clipped_steps"]:
        result.problems.append(f"{unclipped} steps were not clipped, and yet no bucket was committed in any of them")
    elif not result.problems:
        result.inconclusive = (
            f"everything that was compared is equal, but each of the {stats['steps']} steps that were taken had to be "
            f"clipped to max_grad_norm={setup.max_grad_norm:g}, as is common early in training: no speculated bucket "
            f"could be committed, so that was not compared. Take more than --steps {setup.steps} (default "
            f"{Setup().steps}), or another --seed"
        )


def _last(curve: Curve) -> str:
    return ", ".join(f"{loss:.4f}" for loss in curve.losses[-1:])
