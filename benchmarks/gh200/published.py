"""Runs the published setting; torchrun starts it on every rank: ... -m benchmarks.gh200.published RUN RESULT."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

# Before torch is loaded: spinning threads would take the processors of worker threads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gh200.engines import ENGINES, Engine, local_device
from benchmarks.gh200.setting import SAMPLES, SETTLED_FROM, Run
from benchmarks.training.corpus import load_corpus
from superoffload.host.control_groups import usable_memory
from superoffload.host.memory import is_out_of_memory
from superoffload.host.system import System
from superoffload.links.cuda.device import peak_active_bytes

_TEXT_BYTES = 32 << 20


def train(run: Run) -> dict[str, Any]:
    """Trains on every rank of the process group; each returns the same result."""
    device = local_device(run.device)
    memory = Memory(device)
    batches = Batches(run, device)
    try:
        engine = ENGINES[run.engine].make(run, device)
        return {**_trained(run, engine, batches, memory, device), **engine.close()}
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return {"out_of_memory": str(error).splitlines()[0][:300]}


def _trained(run: Run, engine: Engine, batches: Batches, memory: Memory, device: torch.device) -> dict[str, Any]:
    losses: list[Tensor] = []
    settled = min(SETTLED_FROM - 1, run.steps - 1)  # steps before the clock starts
    every = max(1, run.steps // SAMPLES)
    began = time.perf_counter()
    for step in range(run.steps):
        if step == settled:
            _wait_for(device)
            began = time.perf_counter()
        losses.append(engine.step(batches.next(), run.learning_rate(step)))
        if step % every == 0:
            memory.sample()
    _wait_for(device)
    seconds = (time.perf_counter() - began) / (run.steps - settled)
    mean = torch.stack(losses).float()
    dist.all_reduce(mean)
    curve = (mean / run.ranks).tolist()
    return {
        "seconds_per_step": seconds,
        "tokens_per_second": run.tokens_per_step / seconds,
        "losses": [loss if math.isfinite(loss) else None for loss in curve],
        **memory.facts(),
    }


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Batches:
    """Yields windows of text, two bytes a token, each rank its own."""

    def __init__(self, run: Run, device: torch.device) -> None:
        corpus = load_corpus(None, 2 * run.model.sequence, _TEXT_BYTES).train.long()
        self._tokens = ((corpus[:-1] << 8) + corpus[1:]) % run.model.vocabulary
        self._offsets = 2 * torch.arange(run.model.sequence + 1)
        self._batch, self._device = run.batch, device
        self._generator = torch.Generator().manual_seed(1000 * run.seed + dist.get_rank())

    def next(self) -> Tensor:
        last = self._tokens.numel() - int(self._offsets[-1])
        starts = torch.randint(0, last, (self._batch, 1), generator=self._generator)
        return self._tokens[starts + self._offsets].to(self._device, non_blocking=True)


class Memory:
    """Samples peak and average of the device's allocated and the machine's used memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._available = usable_memory(System()) or 0
        self._gpu: list[int] = []
        self._host: list[int] = []

    def sample(self) -> None:
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            self._gpu.append(total - free)
        now = usable_memory(System())
        if now is not None:
            self._host.append(max(0, self._available - now))

    def facts(self) -> dict[str, Any]:
        """Returns the memory facts; host memory is that of all ranks on this machine."""
        found = {**_peak_and_average("gpu", self._gpu), **_peak_and_average("host", self._host)}
        if self._device.type == "cuda":
            found["gpu_peak_active_bytes"] = peak_active_bytes(self._device)
        return found


def _peak_and_average(name: str, samples: list[int]) -> dict[str, int | None]:
    average = sum(samples) // len(samples) if samples else None
    return {f"{name}_peak_bytes": max(samples, default=None), f"{name}_average_bytes": average}


def main() -> None:
    run, path = Run.from_json(json.loads(sys.argv[1])), sys.argv[2]
    device = local_device(run.device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    found = train(run)
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # threads and processes of the engines must not keep this one from ending


if __name__ == "__main__":
    main()
