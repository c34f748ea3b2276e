"""Tests that several ranks converge as their reference does, on this machine's processors or on a cluster's GPUs.

    python -m tests.convergence --engine fsdp2 --ranks 4                   # starts the ranks here, over gloo
    torchrun --nproc-per-node 8 -m tests.convergence --engine fsdp2       # takes those that are there

On every rank a speculative and a synchronous run must have the same losses and the same SHA-256 of masters, moments and
published parameters, with clips, a NaN and an infinity that only one rank has. Losses and gradient norms of every step,
and the weights at the end, must stay within a tolerance of the reference: three times what six runs of it that add up
in different orders differ among themselves. The reference is one process, and for titan torchtitan's own AdamW on the
same ranks. With fsdp2, plain FSDP2 with torch.optim.AdamW on fp32 parameters must stay within it too; with fsdp2, tp,
pp, ep and titan, delivery on demand must have the bits of eager delivery. Exits with 0 only if all of it holds.

Under torchrun with GPUs, single, fsdp2 and ddp train on them (--device cpu: not). That was not tried on GPUs yet.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from superoffload.errors import ArgumentError, SuperOffloadError
from superoffload.tools.output import add_option, check_writable, write_json
from tests.convergence.engines import CHOICES, check_engine, setup_for
from tests.convergence.launched_ranks import LaunchedRanks
from tests.convergence.setup import Setup
from tests.convergence.suite import Result, verify_launched, verify_ranks


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.convergence", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_option(
        parser, "--engine", default="fsdp2", help=f"what trains on the ranks: {', '.join(CHOICES)}; tp cuts each "
        "matrix over two ranks, pp has two stages, ep spreads a mixture of experts over two ranks, each with "
        "fully_shard over the other ranks; titan is torchtitan's Trainer",
    )  # fmt: skip
    parser.add_argument("--ranks", type=int, help="start so many here (default: 2; under torchrun those there)")
    add_option(parser, "--steps", type=int, default=Setup().steps, help="optimizer steps of every run")
    add_option(parser, "--seed", type=int, default=0, help="of weights and batches")
    parser.add_argument("--device", help="cpu or cuda (default: cuda under torchrun where torch has one)")
    parser.add_argument("--json", metavar="PATH", help="write the result to this file too")
    parser.add_argument("--plot", metavar="PATH", help="draw the losses, a PNG")
    parser.add_argument("--quiet", action="store_true", help="no progress, only the result")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser()
    try:
        return _run(parser.parse_args(arguments))
    except SuperOffloadError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ArgumentError) else 1


def _run(args: argparse.Namespace) -> int:
    count = _count(args.ranks, args.engine)
    check_engine(args.engine, count)
    if not 0 <= args.seed < 2**32:
        raise ArgumentError(f"seed={args.seed}: expected a whole number from 0 to {2**32 - 1}")
    setup = Setup(steps=args.steps, seed=args.seed, device=_device(args.device, args.engine))
    setup = setup_for(args.engine, setup.for_ranks(count))
    least = max(setup.nan_step, setup.inf_step, *setup.late_clips)
    if setup.steps < least:
        raise ArgumentError(f"steps={setup.steps}: expected at least {least}, so that all of the trouble is met")
    check_writable(args.json, "json")
    check_writable(args.plot, "plot")
    say = _quiet if args.quiet else functools.partial(print, flush=True)
    if _launched() == 1:
        return _report(args, setup, count, 1, lambda: verify_ranks(setup, args.engine, count, say))
    with LaunchedRanks(setup.device) as ranks:
        if not ranks.leads:
            return 0 if verify_launched(setup, args.engine, ranks, _quiet).verified else 1
        return _report(args, setup, count, ranks.hosts, lambda: verify_launched(setup, args.engine, ranks, say))


def _launched() -> int:
    """Returns how many ranks a launcher such as torchrun has started; 1: none."""
    return int(os.environ.get("WORLD_SIZE") or 1) if "RANK" in os.environ else 1


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


def _device(given: str | None, engine: str) -> str:
    import torch

    on_gpus = engine in ("single", "fsdp2", "ddp")
    if given not in (None, "cpu", "cuda"):
        raise ArgumentError(f"device={given}: expected cpu or cuda")
    if given == "cuda" and not (on_gpus and torch.cuda.is_available() and _launched() > 1):
        raise ArgumentError("device=cuda: expected engine single, fsdp2 or ddp, under torchrun, where torch has CUDA")
    return given or ("cuda" if on_gpus and torch.cuda.is_available() and _launched() > 1 else "cpu")


def _report(args: argparse.Namespace, setup: Setup, count: int, hosts: int, compare: Callable[[], Result]) -> int:
    began = time.perf_counter()
    result = compare()
    ranks = f"{count} ranks" + (f" on {hosts} hosts" if hosts > 1 else "")
    print(_text(result, setup, f"{ranks} with {args.engine}", time.perf_counter() - began))
    if args.json:
        write_json(args.json, {"engine": args.engine, "ranks": count, "hosts": hosts, **_as_json(result, setup)})
    if args.plot and result.tolerance is not None:
        from tests.convergence.plot import plot_curves

        curves = {name: curve.losses for name, curve in result.curves.items()}
        plot_curves(curves, result.tolerance, Path(args.plot), f"{args.engine}, {ranks}")
    return 0 if result.verified else 1


def _text(result: Result, setup: Setup, who: str, seconds: float) -> str:
    lines = [f"  {name:<26} loss {curve.losses[-1]:.4f}" for name, curve in result.curves.items() if curve.losses]
    if result.verified and result.tolerance is not None:
        lines.append(
            f"verified: {who}, {setup.steps} steps: speculative equals synchronous in {result.compared_digests} "
            f"digests per run, and the losses of both differ from {result.tolerance.of} by less than the tolerance, "
            f"{result.tolerance.describe()['loss_at_the_end']:.4f}, in {seconds:.1f} s"
        )
    lines += [f"FAILED: {problem}" for problem in result.problems]
    if result.inconclusive:
        lines.append(f"INCONCLUSIVE: {result.inconclusive}")
    return "\n".join(lines)


def _as_json(result: Result, setup: Setup) -> dict[str, Any]:
    def finite(values: dict[str, Any]) -> dict[str, Any]:
        return {name: value if math.isfinite(value) else None for name, value in values.items()}

    stats = {name: value for name, value in result.curves["speculative"].stats.items() if type(value) in (int, float)}
    return {
        "passed": result.verified,
        "problems": result.problems,
        "inconclusive": result.inconclusive,
        "setup": dataclasses.asdict(setup),
        "digests_compared": result.compared_digests,
        "reference": result.tolerance.of if result.tolerance else None,
        "tolerance": result.tolerance.describe() if result.tolerance else {},
        "loss_at_the_end": finite({name: curve.losses[-1] for name, curve in result.curves.items() if curve.losses}),
        "stats": finite(stats),
    }


def _quiet(text: str) -> None:
    """Says nothing."""


def leave(status: int) -> None:
    """Ends this process at once: a thread of gloo may still need Python, and aborts it if that ends meanwhile."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    leave(main())
