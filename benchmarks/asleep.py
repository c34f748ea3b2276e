"""Measures what ``sleep()`` gives back and how long ``sleep()`` and ``wake()`` take, on the CPU.

    python -m benchmarks.asleep --out benchmarks/results/asleep.json

With a folder (--folder, the current one by default) masters and moments go to the disk, too. Each setting trains bf16
parameters in a process of its own, with speculation and no gradients left while it sleeps.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.results_file import write_rows
from superoffload import AdamW
from superoffload.host.memory import give_free_memory_back

_STATES = (("fp32", "fp32"), ("fp32", "split"), ("8bit", "split"))  # moments, masters
SETTINGS = [(*state, on_disk) for on_disk in (False, True) for state in _STATES]
_EACH = 1 << 22  # elements of a parameter
Row = dict[str, Any]


def name_of(state_dtype: str, master_dtype: str, on_disk: bool) -> str:
    return f"{state_dtype} moments, {master_dtype} masters" + (", on disk" if on_disk else "")


def measure(state_dtype: str, master_dtype: str, folder: str | None, numel: int, rounds: int) -> Row:
    """Returns seconds, and bytes per parameter, as medians over rounds of a step, a sleep and a wake."""
    each = min(_EACH, numel)
    model = nn.ParameterList([nn.Parameter(0.02 * torch.randn(each).bfloat16()) for _ in range(numel // each)])
    total = each * len(model)
    sleeping, waking, given_back, asleep, plain, behind = [], [], [], [], [], []
    with AdamW(model.parameters(), speculation="always", state_dtype=state_dtype, master_dtype=master_dtype) as one:
        for _ in range(rounds + 2):
            behind.append(_step(model, one))  # the first one behind wake()
            plain.append(_step(model, one))
            give_free_memory_back()  # what backward has left is not ours
            awake, began = _resident_bytes(), time.perf_counter()
            one.sleep(folder)
            sleeping.append(time.perf_counter() - began)
            given_back.append(awake - _resident_bytes())
            asleep.append(one.stats()["host_bytes"])
            began = time.perf_counter()
            one.wake()
            waking.append(time.perf_counter() - began)
    return {
        "name": name_of(state_dtype, master_dtype, folder is not None),
        "numel": total,
        "seconds_sleep_median": median(sleeping[2:]),
        "seconds_wake_median": median(waking[2:]),
        "seconds_step_median": median(plain[2:]),
        "seconds_step_behind_wake_median": median(behind[2:]),
        "resident_bytes_given_back_per_param": median(given_back[2:]) / total,
        "kept_bytes_per_param": asleep[-1] / total,
    }


def _step(model: nn.ParameterList, optimizer: AdamW) -> float:
    began = time.perf_counter()
    torch.stack([param.float().square().mean() for param in model]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - began


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run_asleep(numel: int, rounds: int, folder: str) -> list[Row]:
    rows = []
    for state_dtype, master_dtype, on_disk in SETTINGS:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            where = folder if on_disk else None
            rows.append(process.submit(measure, state_dtype, master_dtype, where, numel, rounds).result())
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Measures every setting, prints a table and writes the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.asleep", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--numel", type=float, default=1e8, help="parameters, in bf16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", default=".", help="on a disk, for masters and moments")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    rows = run_asleep(int(args.numel), args.rounds, args.folder)
    print(f"{'':37} sleep, s  wake, s  step, s  behind wake  bytes per parameter: given back, kept")
    for row in rows:
        print(
            f"{row['name']:37} {row['seconds_sleep_median']:8.3f} {row['seconds_wake_median']:8.3f} "
            f"{row['seconds_step_median']:8.3f} {row['seconds_step_behind_wake_median']:12.3f} "
            f"{row['resident_bytes_given_back_per_param']:31.2f} {row['kept_bytes_per_param']:5.2f}"
        )
    write_rows(args.out, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
