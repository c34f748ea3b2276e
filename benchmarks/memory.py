"""Compares the resident memory of a training process with what ``stats()`` and ``superoffload plan`` say.

Each setting trains in a process of its own. What the model and its gradients take is measured before the optimizer is
made, and taken off.
"""

from __future__ import annotations

import argparse
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import command
from superoffload import AdamW
from superoffload.tools.estimate import Settings, estimate_memory, typical_shape

PROMISE = 0.03  # how far stats() and plan may be off
SETTINGS = [
    {"state_dtype": state, "master_dtype": master} for state in ("fp32", "bf16", "8bit") for master in ("fp32", "split")
]
_WIDTH = 4096


def make_parser() -> argparse.ArgumentParser:
    return command.parser(
        "memory",
        "Trains with each setting of masters and moments in a process of its own, and compares what its memory grows "
        "by with stats() after the last step, and with plan at the peak. Exits with 1 if stats() is off by more than "
        "3 %%, or the peak more than that above plan and what backward alone takes. Linux only.",
        plot=False,
    )


class Layers(nn.Module):
    """Holds matrices that all read the same input, so that each has gradients of an ordinary size."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        width = self.width = min(_WIDTH, int(numel**0.5))
        count = max(1, numel // width**2)
        self.matrices = nn.ModuleList(nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(count))

    def forward(self, values: Tensor) -> Tensor:
        return torch.stack([matrix(values).float().square().mean() for matrix in self.matrices]).sum()


def measure(numel: int, steps: int, setting: dict[str, Any]) -> dict[str, Any]:
    """Trains in this process and returns what its memory grew by, in bytes."""
    torch.manual_seed(0)
    model = Layers(numel)
    count = sum(parameter.numel() for parameter in model.parameters())

    def backward(step: int) -> None:
        batch = torch.randn(8, model.width, generator=torch.Generator().manual_seed(step))
        model(batch.bfloat16()).backward()

    def train(optimizer: AdamW, steps: int) -> None:
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            backward(step)
            optimizer.step()
        optimizer.synchronize()

    options: dict[str, Any] = {"speculation": "always", "max_grad_norm": 1e30, **setting}
    backward(0)
    with AdamW([nn.Parameter(torch.zeros(64, dtype=torch.bfloat16))], **options) as small:
        train(small, 1)  # loads all code; the gradients of the model stay
    model.zero_grad()
    backward(0)  # as in training
    before = _resident("VmRSS")
    of_backward = (_resident("VmHWM") - before) / count  # what it takes for a moment, more where bf16 is emulated
    with AdamW(model.parameters(), **options) as optimizer:
        train(optimizer, steps)
        resident, peak, stats = _resident("VmRSS") - before, _resident("VmHWM") - before, optimizer.stats()
    shape = typical_shape(count)
    _, host = estimate_memory(shape, Settings(**setting))
    planned = sum(host.values()) / shape.parameters
    masters = "split" if setting["master_dtype"] == "split" else "whole"
    return {
        "name": f"{setting['state_dtype']} moments, {masters} masters",
        "numel": count,
        "steps": steps,
        "resident_bytes_per_param": resident / count,
        "stats_bytes_per_param": stats["host_bytes"] / count,
        "of_stats": resident / stats["host_bytes"],
        "peak_bytes_per_param": peak / count,
        "planned_bytes_per_param": planned,
        "backward_bytes_per_param": of_backward,
        "of_planned": peak / count / (planned + of_backward),
        "journal_reserved_bytes_per_param": stats["journal_reserved_bytes"] / count,
    }


def _resident(field: str) -> int:
    """Returns this process's resident memory in bytes: now (VmRSS), or at its peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def run(args: argparse.Namespace) -> dict[str, Any]:
    numel, steps = (3 * 10**7, 8) if args.quick else (4 * 10**8, 40)
    columns = ("resident", "stats", "peak", "planned", "journal_reserved")
    print(f"{'bytes per parameter':32}" + "".join(f"{column:>17}" for column in columns))
    rows, missed = [], []
    for setting in SETTINGS:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            row = process.submit(measure, numel, steps, setting).result()
        rows.append(row)
        print(f"{row['name']:32}" + "".join(f"{row[f'{column}_bytes_per_param']:17.2f}" for column in columns))
        if abs(row["of_stats"] - 1) > PROMISE or row["of_planned"] > 1 + PROMISE:
            missed.append(f"{row['name']}: stats() or plan is off by more than {PROMISE:.0%}")
    return {"rows": rows, "missed": missed}


if __name__ == "__main__":
    raise SystemExit(command.start(make_parser(), run))
