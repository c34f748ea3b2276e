"""Measures for `python -m benchmarks.adam --state` what each setting of masters and moments costs per step.

All settings are measured in one run, interleaved (timing.py), with the best instruction set and all threads: each on
arrays of its own, against the memory's limit for the bytes that it moves, and against the default setting. Beside them
stand the steps of other libraries' optimizers with 8-bit and 4-bit moments, where they are installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import style
from benchmarks.adam import contestants as who
from benchmarks.adam.eight_bit_peers import PEERS
from benchmarks.adam.state_error import error_of_peer, error_of_setting, exact_change
from benchmarks.bandwidth.limit import MemoryLimit
from benchmarks.timing import Contestant, Rounds, Samples, interleave, timed
from benchmarks.training.config import STATE_SETTINGS
from benchmarks.workload import BETAS, BYTES_PER_PARAM, EPS, LR, WEIGHT_DECAY, Workload
from superoffload import _native
from superoffload.errors import ArgumentError
from superoffload.optimizer.arguments import check_state_dtype

Row = dict[str, Any]


DEFAULT = "fp32"
_OPERATIONS = tuple(who.OPERATIONS)


def forms_from(asked: str) -> list[str]:
    """Returns the settings to measure: all, or the one asked for beside the default."""
    return list(STATE_SETTINGS) if asked == "all" else list(dict.fromkeys((DEFAULT, asked)))


def check_memory(numel: int, forms: Sequence[str], available: int | None) -> None:
    """Raises ArgumentError if the arrays of all settings would not fit into memory."""
    needed = int(numel * BYTES_PER_PARAM * len(forms))
    if available is not None and needed > 0.8 * available:
        raise ArgumentError(
            f"numel={numel}: the arrays of {len(forms)} settings take {needed / 2**30:.1f} GiB, and "
            f"{available / 2**30:.1f} GiB are free; choose fewer elements, or one setting"
        )


def installed_peers() -> tuple[list[str], dict[str, str]]:
    """Returns the names of other libraries' optimizers that can be timed, and why others cannot."""
    found, missing = [], {}
    for name, peer in PEERS.items():
        try:
            peer.check()
            found.append(name)
        except who.PeerMissing as reason:
            missing[name] = str(reason)
    return found, missing


def run_forms(
    numel: int, threads: int, isa: str, forms: Sequence[str], rounds: Rounds, peers: Sequence[str] = ()
) -> list[Row]:
    """Returns a row per setting and operation, one per limit, and one for the step of each of ``peers``."""
    from superoffload.host.processors import allowed_cpus

    cpus = allowed_cpus()[:threads]
    pool = _native.WorkerPool(cpus)
    try:
        contestants: list[Contestant] = []
        for name in forms:
            moments, masters = STATE_SETTINGS[name]
            workload = Workload(numel, pool, check_state_dtype(moments), split=masters == "split")
            limits, found = who.limits(workload, cpus)
            ours = who.OurKernels(workload, pool, isa).contestants(partial(_bytes_moved, found))
            contestants += [_named(name, one) for one in (*limits, *ours)]
        contestants += [_peer_step(name, numel) for name in peers]
        samples = interleave(contestants, rounds)
    finally:
        pool.close()
    exact = exact_change()
    errors = {name: error_of_setting(name, exact) for name in forms}
    errors |= {name: error_of_peer(PEERS[name], exact) for name in peers}
    return [_row(one, samples, numel, threads, errors) for one in samples.values()]


def _peer_step(name: str, numel: int) -> Contestant:
    """Times a step over fp32 parameters with fp32 gradients."""
    random = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter(0.02 * torch.randn(numel, generator=random))
    param.grad = 1e-3 * torch.randn(numel, generator=random)
    optimizer = PEERS[name].optimizer([param], lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
    moved = 2 * param.element_size() + param.grad.element_size() + 2 * PEERS[name].bytes_per_param
    return Contestant(f"{name}: step", "", moved, timed(optimizer.step), settles=True)


def _bytes_moved(limits: Mapping[str, MemoryLimit], row: str) -> float:
    return limits[row].bytes_per_param


def _named(form: str, one: Contestant) -> Contestant:
    return Contestant(f"{form}: {one.name}", one.isa, one.bytes_per_param, one.seconds)


def _row(
    one: Samples, samples: dict[tuple[str, str], Samples], numel: int, threads: int, errors: Mapping[str, float]
) -> Row:
    form, _, name = one.contestant.name.partition(": ")
    isa = one.contestant.isa
    limit = samples.get((f"{form}: {who.limit_name(name)}", ""))
    default = next((its for (named, _), its in samples.items() if named == f"{DEFAULT}: {name}"), None)
    return {
        "name": name,
        "state": form,
        "isa": isa,
        "threads": threads,
        "numel": numel,
        "seconds_median": one.median,
        "seconds_min": one.minimum,
        "samples": len(one.seconds),
        "bytes_per_param": one.contestant.bytes_per_param,
        "gb_per_s": one.contestant.bytes_per_param * numel / one.median / 1e9,
        "of_limit": limit.ratio_to(one) if limit is not None else None,
        "ratio_to": f"{DEFAULT} {name}",
        "ratio": one.ratio_to(default) if default is not None else None,
        "error": errors[form] if name == "step" else None,
    }


def table(rows: Sequence[Row]) -> str:
    """Returns the rows of our kernels as text."""
    lines = [
        f"{'state':17} {'operation':24} {'ns/param':>9} {'bytes':>6} {'GB/s':>6} {'of limit':>9} {'x faster':>9}"
        f"{'error':>10}"
    ]
    for row in rows:
        if row["isa"] or row["state"] in PEERS:
            limit = f"{row['of_limit']:9.2f}" if row["of_limit"] is not None else f"{'-':>9}"
            error = f"{row['error']:10.1e}" if row["error"] is not None else ""
            lines.append(
                f"{row['state']:17} {row['name']:24} {1e9 * row['seconds_median'] / row['numel']:9.3f} "
                f"{row['bytes_per_param']:6.1f} {row['gb_per_s']:6.1f} {limit} {1 / row['ratio']:9.2f}{error}"
            )
    return "\n".join(lines)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draws the time per parameter of each operation, a bar per setting, with a mark at the memory's limit."""
    colours = (style.MUTED, style.BLUE, style.ORANGE, style.GREEN, style.RED, style.PURPLE)
    forms = [form for form in dict.fromkeys(row["state"] for row in rows) if form in STATE_SETTINGS]
    with style.drawing(path, 11, 4.2) as figure:
        axes = figure.subplots()
        width = 0.8 / len(forms)
        for index, form in enumerate(forms):
            ours = {row["name"]: row for row in rows if row["state"] == form}
            places = [place + (index - (len(forms) - 1) / 2) * width for place in range(len(_OPERATIONS))]
            axes.bar(
                places,
                [_nanoseconds(ours[name]) for name in _OPERATIONS],
                width * 0.9,
                color=colours[index],
                label=form,
            )
            limits = [_nanoseconds(ours[who.limit_name(name)]) for name in _OPERATIONS]
            axes.hlines(limits, [x - width / 2 for x in places], [x + width / 2 for x in places], color=style.INK)
        axes.set_xticks(range(len(_OPERATIONS)), _OPERATIONS)
        axes.set_ylabel("ns per parameter")
        axes.grid(axis="x", visible=False)
        axes.set_title("Time of a pass by setting; lines: the memory's limit for the same bytes")
        figure.legend(loc="outside right upper")


def _nanoseconds(row: Row) -> float:
    return float(1e9 * row["seconds_median"] / row["numel"])
