"""Times the step of Megatron's ``HybridDeviceOptimizer`` on the CPU with ``CPUAdamW`` and with ``torch.optim.AdamW``.

Without a GPU: its copies are made in host memory and its streams are stubs (tests/support/hybrid_device.py), the same
for every contestant. *The step alone* is that of the optimizers that it makes with overlap, without those copies.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from benchmarks import command
from benchmarks.timing import Contestant, Rounds, compared, timed
from superoffload.integrations import megatron as adapter
from tests.support.hybrid_device import hybrid, megatron, parameters, set_gradients, without_streams

OURS, FUSED, PLAIN = "CPUAdamW", "torch fused", "torch"
WHOLE, ALONE = "with copies", "the step alone"
_THREADS = 2  # of every contestant


def make_parser() -> argparse.ArgumentParser:
    parser = command.parser("hybrid_device", (__doc__ or "").split("\n")[0], plot=False)
    command.add_option(parser, "--count", type=int, default=200, help="parameters")
    command.add_option(parser, "--numel", type=int, default=1 << 18, help="elements of each")
    command.add_option(parser, "--seconds", type=float, default=100.0, help="of measuring")
    return parser


def run(args: argparse.Namespace) -> dict[str, Any]:
    command.positive(args, "count", "numel", "seconds")
    count, numel, seconds = (4, 1 << 12, 0.1) if args.quick else (args.count, args.numel, args.seconds)
    torch.set_num_threads(_THREADS)
    print(f"{'overlap':8} {'what':16} {'optimizer':12} {'ms median':>10} {'ms min':>10} {'times as long':>14}")
    rows: list[dict[str, Any]] = []
    with without_streams(), ExitStack() as stack:
        theirs = megatron("megatron.core.optimizer")
        adapter.enable(threads=_THREADS)
        stack.callback(adapter.disable)
        classes = {OURS: (theirs.CPUAdam, True), FUSED: (torch.optim.AdamW, True), PLAIN: (torch.optim.AdamW, False)}
        for overlap, what in ((True, WHOLE), (True, ALONE), (False, WHOLE)):
            contestants = []
            for name, (cls, fused) in classes.items():
                step = _whole(cls, fused, overlap, count, numel) if what == WHOLE else _alone(cls, fused, count, numel)
                contestants.append(Contestant(name, "", 0.0, timed(step), settles=True))
            shared = {"what": what, "overlap": overlap, "optimizers": count if overlap else 1, "tensors": count}
            for row in compared(contestants, Rounds(5, 200, seconds / 3), OURS):
                rows.append({**row, **shared, "numel": count * numel, "threads": _THREADS})
                times = f"{1e3 * row['seconds_median']:10.2f} {1e3 * row['seconds_min']:10.2f} {row['ratio']:14.2f}"
                print(f"{'on' if overlap else 'off':8} {what:16} {row['name']:12} {times}")
    return {"rows": rows}


def _whole(cls: type, fused: bool, overlap: bool, count: int, numel: int) -> Callable[[], object]:
    """Makes Megatron's class over bf16 parameters, steps it once and returns its step."""
    params = parameters([(numel,)] * count, torch.bfloat16)
    set_gradients(params, 0)
    optimizer = hybrid(cls, params, overlap_cpu_optimizer_d2h_h2d=overlap, fused=fused)
    optimizer.step()
    step: Callable[[], object] = optimizer.step
    return step


def _alone(cls: type, fused: bool, count: int, numel: int) -> Callable[[], object]:
    """Makes the optimizers that it makes, without the hooks that copy back, over fp32 masters; returns their steps."""
    params: list[Tensor] = [torch.zeros(numel) for _ in range(count)]
    for param in params:
        param.grad = torch.full((numel,), 1e-3)
    group = {"params": params, "lr": 1e-3, "weight_decay": 0.1, "fused": fused, "param_update_in_fp32": True}
    hybrid_class = megatron("megatron.core.optimizer").HybridDeviceOptimizer
    optimizers = hybrid_class.build_cpu_optimizer_list(cls, [group])  # one for each parameter

    def run() -> None:
        for optimizer in optimizers:
            optimizer.step()

    run()
    return run


if __name__ == "__main__":
    raise SystemExit(command.start(make_parser(), run))
