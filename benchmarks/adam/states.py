"""Measures for `python -m benchmarks.adam --state` what each setting of masters and moments costs per step.

All settings are measured in one run, interleaved (timing.py), with the best instruction set and all threads: each on
arrays of its own, against the memory's limit for the bytes that it moves, and against the default setting. Beside them
stand the steps of other libraries' optimizers with 8-bit and 4-bit moments, where they are installed. *error* is how
far 50 steps move parameters from where fp64 state moves them, relative to the change (root of the mean square).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks import style
from benchmarks.adam.kernels import OPERATIONS, OPTIONS, limit_name, limits, our_kernels, row_of
from benchmarks.adam.peers import PEERS
from benchmarks.timing import Contestant, Rounds, Samples, interleave, timed
from benchmarks.training.config import STATE_SETTINGS
from benchmarks.workload import BETAS, EPS, LR, WEIGHT_DECAY, Workload
from superoffload import _native
from superoffload.adamw import AdamW
from superoffload.host.processors import allowed_cpus
from superoffload.optimizer.arguments import check_state_dtype

Row = dict[str, Any]

DEFAULT = "fp32"
_STEPS, _NUMEL = 50, 1 << 18  # of the error


def run_forms(
    numel: int, threads: int, isa: str, forms: Sequence[str], seconds: float, peers: Sequence[str]
) -> list[Row]:
    """Returns a row per setting and operation, one per limit, and one for the step of each of ``peers``."""
    cpus = allowed_cpus()[:threads]
    pool = _native.WorkerPool(cpus)
    try:
        contestants: list[Contestant] = []
        for form in forms:
            moments, masters = STATE_SETTINGS[form]
            workload = Workload(numel, pool, check_state_dtype(moments), split=masters == "split")
            walks, found = limits(workload, cpus)
            for one in (*walks, *our_kernels(workload, pool, isa, found)):
                contestants.append(Contestant(f"{form}: {one.name}", one.isa, one.bytes_per_param, one.seconds))
        contestants += [_peer_step(name, numel) for name in peers]
        samples = interleave(contestants, Rounds(5, 200, seconds))
    finally:
        pool.close()
    exact = _exact_change()
    errors = {form: _error_of_setting(form, exact) for form in forms}
    errors |= {name: _error_of_peer(name, exact) for name in peers}
    return [_row(one, samples, isa, numel, threads, errors) for one in samples.values()]


def _peer_step(name: str, numel: int) -> Contestant:
    """Times a step over fp32 parameters with fp32 gradients."""
    random = torch.Generator().manual_seed(0)
    param = nn.Parameter(0.02 * torch.randn(numel, generator=random))
    param.grad = 1e-3 * torch.randn(numel, generator=random)
    optimizer = PEERS[name].optimizer([param], **OPTIONS)
    moved = 3 * param.element_size() + 2 * PEERS[name].bytes_per_param
    return Contestant(f"{name}: step", "", moved, timed(optimizer.step), settles=True)


def _row(
    one: Samples, samples: dict[tuple[str, str], Samples], isa: str, numel: int, threads: int, errors: dict[str, float]
) -> Row:
    form, _, name = one.contestant.name.partition(": ")
    limit = samples.get((f"{form}: {limit_name(name)}", ""))
    walk = name.startswith(limit_name(""))
    default = samples[f"{DEFAULT}: {name}", "" if walk else isa]
    row = row_of(one, threads, numel, limit, default, f"{DEFAULT} {name}")
    return {**row, "name": name, "state": form, "error": errors[form] if name == "step" else None}


# ---- errors ---------------------------------------------------------------------------------------------------------


def _initial() -> Tensor:
    return 0.02 * torch.randn(_NUMEL, generator=torch.Generator().manual_seed(1)).bfloat16()


def _gradients() -> Iterator[Tensor]:
    """Yields bf16 gradients like those of the timed arrays: each element has a size and a direction, under noise."""
    random = torch.Generator().manual_seed(2)
    scale = 1e-3 * torch.exp(torch.randn(_NUMEL, generator=random))
    direction = 0.3 * torch.randn(_NUMEL, generator=random)
    for _ in range(_STEPS):
        yield (scale * (direction + torch.randn(_NUMEL, generator=random))).bfloat16()


def _exact_change() -> NDArray[np.float64]:
    """Returns what AdamW in double precision adds to the parameters."""
    beta1, beta2 = BETAS
    initial = _initial().double().numpy()
    master, exp_avg, exp_avg_sq = initial.copy(), np.zeros(_NUMEL), np.zeros(_NUMEL)
    for step, gradient in enumerate(_gradients(), 1):
        g = gradient.double().numpy()
        exp_avg = beta1 * exp_avg + (1 - beta1) * g
        exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
        denominator = np.sqrt(exp_avg_sq) / math.sqrt(1 - beta2**step) + EPS
        master = master * (1 - LR * WEIGHT_DECAY) - LR / (1 - beta1**step) * exp_avg / denominator
    change: NDArray[np.float64] = master - initial
    return change


def _error_of_setting(setting: str, exact: NDArray[np.float64]) -> float:
    moments, masters = STATE_SETTINGS[setting]
    param = nn.Parameter(_initial())
    with AdamW([param], **OPTIONS, speculation="never", state_dtype=moments, master_dtype=masters) as optimizer:
        return _error(param, optimizer, lambda: optimizer.state[param]["master"], exact)


def _error_of_peer(name: str, exact: NDArray[np.float64]) -> float:
    param = nn.Parameter(_initial().float())
    return _error(param, PEERS[name].optimizer([param], **OPTIONS), param.detach, exact)


def _error(param: nn.Parameter, optimizer: Any, master: Callable[[], Tensor], exact: NDArray[np.float64]) -> float:
    for gradient in _gradients():
        param.grad = gradient.to(param.dtype)
        optimizer.step()
    away = master().double().numpy() - _initial().double().numpy() - exact
    return float(np.sqrt(np.mean(away**2) / np.mean(exact**2)))


# ---- what is shown --------------------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> str:
    head = f"{'state':17} {'operation':24} {'ns/param':>9} {'bytes':>6} {'GB/s':>6} {'of limit':>9} {'x faster':>9}"
    lines = [head + f"{'error':>10}"]
    for row in rows:
        if row["isa"] or row["state"] in PEERS:
            limit = f"{row['of_limit']:9.2f}" if row["of_limit"] is not None else f"{'-':>9}"
            error = f"{row['error']:10.1e}" if row["error"] is not None else ""
            lines.append(
                f"{row['state']:17} {row['name']:24} {_nanoseconds(row):9.3f} "
                f"{row['bytes_per_param']:6.1f} {row['gb_per_s']:6.1f} {limit} {1 / row['ratio']:9.2f}{error}"
            )
    return "\n".join(lines)


def plot(report: dict[str, Any], path: Path) -> None:
    """Draws the time per parameter of each operation, a bar per setting, with a mark at the memory's limit."""
    rows, names = report["rows"], list(OPERATIONS)
    colours = (style.MUTED, style.BLUE, style.ORANGE, style.GREEN, style.RED, style.PURPLE)
    forms = [form for form in dict.fromkeys(row["state"] for row in rows) if form in STATE_SETTINGS]
    width = 0.8 / len(forms)
    with style.drawing(path, 11, 4.2) as figure:
        axes = figure.subplots()
        for index, (form, colour) in enumerate(zip(forms, colours, strict=False)):
            times = {row["name"]: _nanoseconds(row) for row in rows if row["state"] == form}
            places = [place + (index - (len(forms) - 1) / 2) * width for place in range(len(names))]
            axes.bar(places, [times[name] for name in names], width * 0.9, color=colour, label=form)
            walks = [times[limit_name(name)] for name in names]
            axes.hlines(walks, [x - width / 2 for x in places], [x + width / 2 for x in places], color=style.INK)
        axes.set_xticks(range(len(names)), names)
        axes.set_ylabel("ns per parameter")
        axes.grid(axis="x", visible=False)
        axes.set_title("Time of a pass by setting; lines: the memory's limit for the same bytes")
        figure.legend(loc="outside right upper")


def _nanoseconds(row: Row) -> float:
    return float(1e9 * row["seconds_median"] / row["numel"])
