r"""Draws loss curves of 1, 2 and 4 ranks: speculative, synchronous, and plain FSDP2 with torch.optim.AdamW.

    python -m benchmarks.ranks.curves --max-grad-norm 1 \
        --out benchmarks/results/rank_curves.json --plot docs/images/ranks.png

Runs `superoffload verify --engine fsdp2` for 2 and 4 ranks on this machine and keeps the curves; exits 0 only if both
are verified.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path
from typing import Any

from benchmarks.facts import machine_facts, version_facts
from benchmarks.results_file import write_results
from tests.convergence.compare import Tolerance
from tests.convergence.plot import plot_curves
from tests.convergence.setup import Setup
from tests.convergence.suite import verify_ranks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--max-grad-norm", type=float, default=Setup().max_grad_norm)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/rank_curves.json"))
    parser.add_argument("--plot", type=Path, help="where to draw (default: next to --out)")
    args = parser.parse_args()
    setup = dataclasses.replace(Setup(), steps=args.steps, max_grad_norm=args.max_grad_norm)
    curves: dict[str, list[float]] = {}
    rows: list[dict[str, Any]] = []
    tolerance: Tolerance | None = None
    for count in args.ranks:
        result = verify_ranks(setup, "fsdp2", count)
        tolerance = tolerance or result.tolerance
        assert tolerance is not None and result.tolerance is not None
        for name, curve in result.curves.items():
            curves["one process" if name == "one process" else f"{count} ranks, {name}"] = curve.losses
        digests = result.compared_digests
        rows.append({"ranks": count, "problems": result.problems, "digests": digests, **result.tolerance.describe()})
    facts = {"machine": machine_facts(), "versions": version_facts(), "setup": dataclasses.asdict(setup), "rows": rows}
    finite = {name: [v if math.isfinite(v) else None for v in losses] for name, losses in curves.items()}
    assert tolerance is not None
    allowed = {"mean_of_one_process_runs": tolerance.losses, "allowed_distance": tolerance.allowed_losses()}
    write_results(args.out, {**facts, "losses": finite, **allowed})
    plot_curves(curves, tolerance, args.plot or args.out.with_suffix(".png"))
    return 1 if any(row["problems"] for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
