"""Runs `superoffload verify --engine E`: several ranks converge as their reference does. ``--ranks N`` starts them on
this machine; under torchrun they are there, on one host or several."""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from benchmarks.training.config import check_seed
from superoffload.errors import ArgumentError

if TYPE_CHECKING:
    from superoffload.tools.convergence.convergence_setup import Setup
    from superoffload.tools.convergence.suite import Result

STEPS = 200


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several ranks")
    group.add_argument(
        "--ranks",
        type=int,
        help="compare so many ranks on this machine with a reference, over gloo (see --engine); not under torchrun, "
        "where the ranks that it has started are compared",
    )
    group.add_argument(
        "--engine",
        help="what trains on the ranks: single, fsdp2, ddp, tp (each matrix cut over two ranks), pp (two pipeline "
        "stages), ep (a mixture of experts, spread over two ranks), each of these three with fully_shard over the "
        "other ranks, deepspeed, or titan (torchtitan's Trainer, compared with its own AdamW; fully_shard, on four or "
        "more ranks in pairs also tensor parallelism) (default: fsdp2 with --ranks or under torchrun, else single). "
        "The model, the batch and the trouble are fixed; of the other options only --steps (default "
        f"{STEPS}), --seed, --out, --json and --quiet can be given",
    )
    count = {"help", "ranks", "engine", "steps", "seed", "out", "json", "quiet"}
    fixed = {action.dest: action.option_strings[0] for action in parser._actions if action.dest not in count}
    parser.set_defaults(fixed_for_ranks={name: (flag, parser.get_default(name)) for name, flag in fixed.items()})


def is_wanted(args: argparse.Namespace) -> bool:
    return args.ranks is not None or args.engine is not None or _launched() > 1


def _launched() -> int:
    """Returns how many ranks a launcher such as torchrun has started, this process among them; 1: none has."""
    return int(os.environ.get("WORLD_SIZE") or 1) if "RANK" in os.environ else 1


def _refuse_fixed(args: argparse.Namespace) -> None:
    """Raises for an option that would have no effect."""
    for name, (flag, default) in args.fixed_for_ranks.items():
        if getattr(args, name) != default:
            raise ArgumentError(
                f"{flag} has no effect with --ranks or --engine, where the model, the batch and the trouble are fixed; "
                "leave it out"
            )


def run(args: argparse.Namespace) -> int:
    from superoffload.tools.convergence.convergence_setup import Setup
    from superoffload.tools.convergence.engines import check_engine, setup_for
    from superoffload.tools.convergence.launched_ranks import LaunchedRanks
    from superoffload.tools.convergence.suite import verify_launched, verify_ranks

    _refuse_fixed(args)
    steps, engine = args.steps, args.engine or "fsdp2"
    count = _count(args.ranks, engine)
    check_engine(engine, count)
    check_seed(args.seed)
    setup = setup_for(engine, Setup(steps=STEPS if steps is None else steps, seed=args.seed).for_ranks(count))
    least = max(setup.nan_step, setup.inf_step, *setup.late_clips)
    if setup.steps < least:
        raise ArgumentError(f"steps={setup.steps}: expected at least {least}, so that all of the trouble is met")
    say = _quiet if args.quiet else _say
    if _launched() == 1:
        return _report(args, setup, engine, count, 1, lambda: verify_ranks(setup, engine, count, say))
    with LaunchedRanks() as ranks:
        if not ranks.leads:
            return 0 if verify_launched(setup, engine, ranks, _quiet).verified else 1
        return _report(args, setup, engine, count, ranks.hosts, lambda: verify_launched(setup, engine, ranks, say))


def _report(
    args: argparse.Namespace, setup: Setup, engine: str, count: int, hosts: int, compare: Callable[[], Result]
) -> int:
    from benchmarks.ranks.ranks_report import finish_ranks, ranks_summary
    from superoffload.tools.output import check_writable, write_json
    from superoffload.tools.report.run_folder import RunFolder

    check_writable(args.json, "json")
    began = time.perf_counter()
    with RunFolder(args.out) as folder:
        result = compare()
        summary = ranks_summary(result, setup, engine, count, hosts, time.perf_counter() - began, args.command_line)
        _write_metrics(folder, result)
    print(finish_ranks(folder, summary, result))
    if args.json:
        write_json(args.json, summary)
    return 0 if result.verified else 1


def _count(given: int | None, engine: str) -> int:
    """Returns how many ranks to compare."""
    there = _launched()
    if there > 1:
        if given not in (None, there):
            raise ArgumentError(f"ranks={given}: {there} ranks were launched (WORLD_SIZE); leave --ranks out")
        return there
    count = given if given is not None else 1 if engine == "single" else 2
    if not 1 <= count <= 64:
        raise ArgumentError(f"ranks={count}: expected 1 to 64 ranks on this machine")
    return count


def _say(text: str) -> None:
    print(text, flush=True)


def _quiet(text: str) -> None:
    pass


def _write_metrics(folder: Any, result: Result) -> None:
    steps = max((len(curve.losses) for curve in result.curves.values()), default=0)
    for step in range(steps):
        values: dict[str, Any] = {"step": step + 1}
        for name, curve in result.curves.items():
            if step < len(curve.losses):
                loss = curve.losses[step]
                values[name] = loss if math.isfinite(loss) else None
        folder.add_metrics(values)
