"""The kernels against the memory's limit and against other libraries."""

from __future__ import annotations

import argparse
import math
from typing import Any

from benchmarks import command
from benchmarks.training.config import STATE_SETTINGS
from superoffload.errors import ArgumentError
from superoffload.tools.output import add_option

_LARGE, _QUICK = 1 << 26, 1 << 22
_SIZES = tuple(1 << power for power in range(10, 29, 2))  # 1 k to 256 M


def make_parser() -> argparse.ArgumentParser:
    parser = command.parser(
        "adam",
        description="Times step, journaled step, undo, replay and publish of every instruction set of this machine "
        "against a walk over the same memory, torch's fused AdamW and DeepSpeedCPUAdam, interleaved. Exits with 0 once "
        "everything was measured, whether targets were met or not: those depend on the machine.",
    )
    add_option(parser, "--numel", type=int, default=_LARGE, help="elements of the large arrays")
    parser.add_argument(
        "--sizes", type=int, nargs="*", metavar="N", help="elements of the growth curve (default: 1 k to 256 M)"
    )
    parser.add_argument(
        "--threads", type=int, nargs="+", metavar="N", help="thread counts (default: 1, powers of two, all)"
    )
    parser.add_argument("--isas", nargs="+", metavar="NAME", help="instruction sets (default: all of this machine)")
    add_option(parser, "--seconds", type=float, default=30.0, help="for each of the two large tables")
    parser.add_argument("--no-deepspeed", action="store_true", help="do not time DeepSpeedCPUAdam, though installed")
    parser.add_argument(
        "--state",
        choices=(*STATE_SETTINGS, "all"),
        help="compare this setting of masters and moments with the default (fp32), and nothing else; all: every "
        "setting, and other libraries' 8-bit and 4-bit moments, where they are installed",
    )
    parser.add_argument("--quick", action="store_true", help="small arrays and short times, to see that it works")
    command.add_output_options(parser, facts="machine, versions, limit and rows")
    return parser


def run(args: argparse.Namespace) -> int:
    from benchmarks.adam import report as adam_report
    from benchmarks.adam.accuracy import accuracy_text
    from benchmarks.adam.kernels import AdamBenchmark, check_memory, run_adam
    from superoffload.host.system import System, usable_memory

    settings: AdamBenchmark = _settings(args)
    if args.state is not None:
        return _compare_states(args, settings)
    check_memory("numel", settings.numel, usable_memory(System()))
    check_memory("sizes", max(settings.sizes, default=0), usable_memory(System()))
    facts = command.begin(args)
    report = {
        **facts,
        "settings": {"numel": settings.numel, "isas": list(settings.isas), "threads": list(settings.threads)},
        **run_adam(settings, command.progress(args)),
    }
    print(adam_report.table(report["rows"]))
    print()
    print(adam_report.targets_table(report))
    print()
    print(accuracy_text(report["accuracy"]))
    for name, state in report["peers"].items():
        print(f"peer {name}: {state}")
    command.write(args, report, lambda path: adam_report.plot(report, path))
    return 0


def _compare_states(args: argparse.Namespace, settings: Any) -> int:
    from benchmarks.adam import states as state_speed
    from benchmarks.adam.state_error import STEPS
    from benchmarks.adam.states import DEFAULT
    from benchmarks.timing import Rounds
    from superoffload import kernels
    from superoffload.host.system import System, usable_memory

    forms = state_speed.forms_from(args.state)
    state_speed.check_memory(settings.numel, forms, usable_memory(System()))
    facts, threads, isa = command.begin(args), max(settings.threads), settings.isas[-1]
    peers, missing = state_speed.installed_peers() if args.state == "all" else ([], {})
    command.progress(args)(f"{', '.join((*forms, *peers))}: {settings.numel:,} elements, {threads} threads, {isa}")
    with kernels.using_isa(isa):
        rows = state_speed.run_forms(settings.numel, threads, isa, forms, Rounds(5, 200, settings.seconds), peers)
    report = {**facts, "settings": {"numel": settings.numel, "isa": isa, "threads": threads}, "rows": rows}
    print(state_speed.table(rows))
    print(f"error: of what {STEPS} steps change, relative to fp64; of limit: peers have none, x faster: than {DEFAULT}")
    for name, why in missing.items():
        print(f"peer {name}: {why}")
    command.write(args, report, lambda path: state_speed.plot(rows, path))
    return 0


def _settings(args: argparse.Namespace) -> Any:
    from benchmarks.adam.kernels import AdamBenchmark
    from superoffload import kernels
    from superoffload.host.processors import allowed_cpus

    cpus = len(allowed_cpus())
    threads = sorted(set(args.threads or [1, cpus, *(1 << power for power in range(cpus.bit_length()))]))
    threads = [count for count in threads if args.threads or count <= cpus]
    if threads[0] < 1 or threads[-1] > cpus:
        raise ArgumentError(
            f"threads={args.threads}: expected numbers from 1 to {cpus}, the processors of this process"
        )
    available = kernels.available_isas()
    isas = args.isas or list(available)
    unknown = [isa for isa in isas if isa not in available]
    if unknown:
        raise ArgumentError(f"isas={' '.join(unknown)}: not on this machine, which has {', '.join(available)}")
    numel = _QUICK if args.quick else args.numel
    sizes = args.sizes if args.sizes is not None else [size for size in _SIZES if not args.quick or size <= _QUICK]
    if numel < 1024 or any(size < 1 for size in sizes):
        raise ArgumentError(f"numel={numel}, sizes={sizes}: expected at least 1024 elements, and positive sizes")
    if not 0 < args.seconds < math.inf:
        raise ArgumentError(f"seconds={args.seconds:g}: expected a positive number")
    seconds = min(args.seconds, 1.0) if args.quick else args.seconds
    ordered = [isa for isa in available if isa in isas]  # the best one last
    return AdamBenchmark(numel, sizes, threads, ordered, seconds, with_deepspeed=not args.no_deepspeed)


if __name__ == "__main__":
    raise SystemExit(command.start(make_parser(), run))
