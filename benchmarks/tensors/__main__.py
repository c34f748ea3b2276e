"""What one more parameter tensor costs per step."""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks import command
from superoffload.errors import ArgumentError
from superoffload.tools.output import add_option

COUNTS = (250, 1000, 2000, 5000, 20000)
_QUICK_COUNTS = (50, 200)


def make_parser() -> argparse.ArgumentParser:
    parser = command.parser(
        "tensors",
        description="Trains a model of many small fp32 parameters, one per module, and reports the microseconds per "
        "tensor that torch's fused AdamW, AdamW and CPUAdamW add to backward and step(), beyond autograd alone, and "
        "those per module that on-demand delivery adds to eager delivery. Contestants take turns; by default all of it "
        "runs on one processor. Exits with 0 once everything was measured, whether aims were met or not.",
    )
    counts = " ".join(map(str, COUNTS))
    parser.add_argument(
        "--counts", type=int, nargs="+", metavar="N", help=f"parameter tensors of the model (default: {counts})"
    )
    add_option(parser, "--numel", type=int, default=256, help="elements per tensor")
    add_option(
        parser,
        "--idle",
        type=float,
        default=0.0,
        help="share of the tensors that get no gradient in a step, as experts without a token; others in each step",
    )
    add_option(parser, "--processors", type=int, default=1, help="for torch, worker threads and everything else")
    add_option(parser, "--rounds", type=int, default=7, help="turns of each contestant")
    add_option(parser, "--steps", type=int, default=3, help="per turn")
    parser.add_argument("--quick", action="store_true", help="few tensors and rounds, to see that it works")
    command.add_output_options(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    settings = _settings(args)
    from benchmarks.tensors import report as per_tensor_report
    from benchmarks.tensors.steps import check_memory, run_tensors
    from superoffload.host.system import System, usable_memory

    check_memory(settings.counts, settings.numel, usable_memory(System()))
    facts = command.begin(args)
    shown = {"numel": settings.numel, "cpus": list(settings.cpus), "rounds": settings.rounds, "steps": settings.steps}
    shown["idle"] = settings.idle
    rows = run_tensors(settings, command.progress(args))
    report = {**facts, "settings": shown, "limit": None, "rows": rows}
    print(per_tensor_report.table(rows))
    print()
    print(per_tensor_report.aims_table(rows))
    command.write(args, report, lambda path: per_tensor_report.plot(report, path))
    return 0


def _settings(args: argparse.Namespace) -> Any:
    from benchmarks.tensors.steps import TensorsBenchmark
    from superoffload.host.processors import allowed_cpus

    cpus = allowed_cpus()
    if not 1 <= args.processors <= len(cpus):
        raise ArgumentError(
            f"processors={args.processors}: expected a number from 1 to {len(cpus)}, the processors of this process"
        )
    command.check_at_least(args, 1, "numel", "rounds", "steps")
    counts = sorted(set(args.counts or (_QUICK_COUNTS if args.quick else COUNTS)))
    if counts[0] < 1:
        raise ArgumentError(f"counts={counts[0]}: expected positive numbers")
    if not 0.0 <= args.idle < 1.0:
        raise ArgumentError(f"idle={args.idle}: expected a share from 0 to less than 1")
    rounds, steps = (2, 1) if args.quick else (args.rounds, args.steps)
    return TensorsBenchmark(counts, args.numel, cpus[: args.processors], rounds, steps, args.idle)


if __name__ == "__main__":
    raise SystemExit(command.start(make_parser(), run))
