"""Times the step of Megatron's ``HybridDeviceOptimizer`` on the CPU with ``CPUAdamW`` and with ``torch.optim.AdamW``.

    python -m benchmarks.hybrid_device --out benchmarks/results/hybrid_device.json

Without a GPU: its copies are made in host memory and its streams are stubs (tests/support/hybrid_device.py), the same
for every contestant. *The step alone* is that of the optimizers that it makes with overlap, without those copies.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.results_file import write_rows
from benchmarks.timing import Contestant, Rounds, interleave, timed
from superoffload.integrations import megatron as adapter
from tests.support.hybrid_device import hybrid, megatron, parameters, set_gradients, without_streams

OURS, FUSED, PLAIN = "CPUAdamW", "torch fused", "torch"
WHOLE, ALONE = "with copies", "the step alone"

Row = dict[str, Any]


def run_hybrid(count: int, numel: int, threads: int, seconds: float) -> list[Row]:
    """Returns a row per contestant, with and without overlap, with and without the copies of Megatron's class."""
    torch.set_num_threads(threads)
    rows: list[Row] = []
    with without_streams(), ExitStack() as stack:
        theirs = megatron("megatron.core.optimizer")
        if not adapter.is_enabled():
            adapter.enable(threads=threads)
            stack.callback(adapter.disable)
        classes = {OURS: (theirs.CPUAdam, True), FUSED: (torch.optim.AdamW, True), PLAIN: (torch.optim.AdamW, False)}
        for overlap in (True, False):
            for what in (WHOLE, ALONE) if overlap else (WHOLE,):
                make = _whole if what == WHOLE else _alone
                made = {name: make(cls, fused, overlap, count, numel) for name, (cls, fused) in classes.items()}
                contestants = [Contestant(name, "", 0.0, timed(run), settles=True) for name, run in made.items()]
                samples = interleave(contestants, Rounds(5, 200, seconds / 3))
                rows += [
                    {
                        "name": one.contestant.name,
                        "what": what,
                        "overlap": overlap,
                        "optimizers": count if overlap else 1,
                        "tensors": count,
                        "numel": count * numel,
                        "threads": threads,
                        "rounds": len(one.seconds),
                        "seconds_median": one.median,
                        "seconds_min": one.minimum,
                        "ratio_to": OURS,
                        "ratio": one.ratio_to(samples[OURS, ""]),
                    }
                    for one in samples.values()
                ]
    return rows


def _whole(cls: type, fused: bool, overlap: bool, count: int, numel: int) -> Callable[[], object]:
    """Makes Megatron's class over bf16 parameters, steps it once and returns its step."""
    params = parameters([(numel,)] * count, torch.bfloat16)
    set_gradients(params, 0)
    optimizer = hybrid(cls, params, overlap_cpu_optimizer_d2h_h2d=overlap, fused=fused)
    optimizer.step()
    step: Callable[[], object] = optimizer.step
    return step


def _alone(cls: type, fused: bool, overlap: bool, count: int, numel: int) -> Callable[[], object]:
    """Makes the optimizers that it makes, without the hooks that copy back, over fp32 masters; returns their steps."""
    params: list[Tensor] = [torch.zeros(numel) for _ in range(count)]
    for param in params:
        param.grad = torch.full((numel,), 1e-3)
    group = {"params": params, "lr": 1e-3, "weight_decay": 0.1, "fused": fused, "param_update_in_fp32": True}
    hybrid_class = megatron("megatron.core.optimizer").HybridDeviceOptimizer
    assert overlap  # an optimizer for each parameter
    optimizers = hybrid_class.build_cpu_optimizer_list(cls, [group])

    def run() -> None:
        for optimizer in optimizers:
            optimizer.step()

    run()
    return run


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all contestants in turn, prints a table and writes the JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hybrid_device", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--count", type=int, default=200, help="parameters")
    parser.add_argument("--numel", type=int, default=1 << 18, help="elements of each")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    rows = run_hybrid(args.count, args.numel, args.threads, args.seconds)
    print(f"{'overlap':8} {'what':16} {'optimizer':12} {'ms median':>10} {'ms min':>10} {'times as long':>14}")
    for row in rows:
        times = f"{1e3 * row['seconds_median']:10.2f} {1e3 * row['seconds_min']:10.2f} {row['ratio']:14.2f}"
        print(f"{'on' if row['overlap'] else 'off':8} {row['what']:16} {row['name']:12} {times}")
    write_rows(args.out, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
