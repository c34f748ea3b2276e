"""Draws loss curves of 1, 2 and 4 ranks: speculative, synchronous, and plain FSDP2 with torch.optim.AdamW.

Runs the convergence suite's comparison under FSDP2 for 2 and 4 ranks on this machine and keeps the curves; exits 0 only
if both are verified.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path
from typing import Any

from benchmarks import command
from tests.convergence.compare import Tolerance
from tests.convergence.plot import plot_curves
from tests.convergence.setup import Setup
from tests.convergence.suite import verify_ranks


def make_parser() -> argparse.ArgumentParser:
    parser = command.parser("rank_curves", (__doc__ or "").split("\n")[0])
    command.add_option(parser, "--max-grad-norm", type=float, default=Setup().max_grad_norm, help="the threshold")
    return parser


def run(args: argparse.Namespace) -> dict[str, Any]:
    command.positive(args, "max_grad_norm")
    ranks, steps = ([2], 45) if args.quick else ([2, 4], 200)
    setup = dataclasses.replace(Setup(), steps=steps, max_grad_norm=args.max_grad_norm)
    curves: dict[str, list[float]] = {}
    rows: list[dict[str, Any]] = []
    first: Tolerance | None = None
    for count in ranks:
        result = verify_ranks(setup, "fsdp2", count)
        assert result.tolerance is not None
        first = first or result.tolerance
        for name, curve in result.curves.items():
            curves["one process" if name == "one process" else f"{count} ranks, {name}"] = curve.losses
        digests = result.compared_digests
        rows.append({"ranks": count, "problems": result.problems, "digests": digests, **result.tolerance.describe()})
    assert first is not None
    if args.plot:
        plot_curves(curves, first, Path(args.plot))
    return {
        "setup": dataclasses.asdict(setup),
        "rows": rows,
        "losses": {name: [v if math.isfinite(v) else None for v in losses] for name, losses in curves.items()},
        "mean_of_one_process_runs": first.losses,
        "allowed_distance": first.allowed_losses(),
        "missed": [problem for row in rows for problem in row["problems"]],
    }


if __name__ == "__main__":
    raise SystemExit(command.start(make_parser(), run))
