"""Runs `superoffload verify --ranks N --engine E`: several ranks on this machine converge as one process does."""

from __future__ import annotations

import argparse
import math
import time
from typing import TYPE_CHECKING, Any

from superoffload.errors import ArgumentError
from superoffload.tools.train.training_config import check_seed

if TYPE_CHECKING:
    from superoffload.tools.convergence.suite import Result

STEPS = 200


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several ranks")
    group.add_argument(
        "--ranks", type=int, help="compare so many ranks on this machine with one process, over gloo (see --engine)"
    )
    group.add_argument(
        "--engine",
        help="what trains on the ranks: single, fsdp2, ddp, tp (each matrix cut over two ranks), pp (two pipeline "
        "stages), ep (a mixture of experts, spread over two ranks), each of these three with fully_shard over the "
        "other ranks, or deepspeed (default: fsdp2 with --ranks, else single). "
        "The model, the batch and the trouble are fixed; of the other options only --steps (default "
        f"{STEPS}), --seed, --out, --json and --quiet can be given",
    )
    count = {"help", "ranks", "engine", "steps", "seed", "out", "json", "quiet"}
    fixed = {action.dest: action.option_strings[0] for action in parser._actions if action.dest not in count}
    parser.set_defaults(fixed_for_ranks={name: (flag, parser.get_default(name)) for name, flag in fixed.items()})


def is_wanted(args: argparse.Namespace) -> bool:
    return args.ranks is not None or args.engine is not None


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
    from superoffload.tools.convergence.suite import verify_ranks
    from superoffload.tools.report.ranks_report import finish_ranks, ranks_summary
    from superoffload.tools.report.run_folder import RunFolder, check_writable, write_json

    _refuse_fixed(args)
    steps, engine = args.steps, args.engine or "fsdp2"
    count = args.ranks if args.ranks is not None else 1 if engine == "single" else 2
    check_engine(engine, count)
    check_seed(args.seed)
    setup = setup_for(engine, Setup(steps=STEPS if steps is None else steps, seed=args.seed))
    least = max(setup.nan_step, setup.inf_step, *setup.late_clips)
    if setup.steps < least:
        raise ArgumentError(f"steps={setup.steps}: expected at least {least}, so that all of the trouble is met")
    check_writable(args.json, "json")
    began = time.perf_counter()
    with RunFolder(args.out) as folder:
        result = verify_ranks(setup, engine, count, _quiet if args.quiet else _say)
        summary = ranks_summary(result, setup, engine, count, time.perf_counter() - began, args.command_line)
        _write_metrics(folder, result)
    print(finish_ranks(folder, summary, result))
    if args.json:
        write_json(args.json, summary)
    return 0 if result.verified else 1


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
