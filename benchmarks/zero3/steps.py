"""Measures ZeRO-3 with stock CPU offload and with superoffload in the same processes, steps taken in turn.

On GPUs that DeepSpeed sees, DeepSpeed's own SuperOffload, which needs them, takes part too. The optimizer part is the
time of the training thread in ``partition_grads`` (where gradients go to host memory and are measured), in the
optimizer's ``step()`` and, with on-demand delivery, in waiting for parameters. The first steps, whose ranks are
compared in full, are warm-up.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.timing import in_turn
from superoffload.errors import ArgumentError, SuperOffloadError

_WARM_UP_STEPS = 4

STOCK, EAGER, LATER = "stock", "superoffload", "superoffload, on demand"
UPSTREAM = "DeepSpeed SuperOffload"


@dataclass(frozen=True)
class Workload:
    width: int
    layers: int
    tokens: int
    rounds: int  # measured turns of each contestant
    steps: int  # per turn
    clip: float
    precision: str
    threads: int | None
    contestants: tuple[str, ...] = (STOCK, EAGER, LATER)  # UPSTREAM last: ours cannot be enabled beside it


def on_gpus() -> bool:
    """Returns whether ranks train on GPUs, one each; ``DS_ACCELERATOR=cpu`` keeps them off."""
    import torch

    return torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR", "cuda") == "cuda"


def default_ranks() -> list[int]:
    import torch

    return [1] if on_gpus() and torch.cuda.device_count() < 2 else [1, 2]


def check_ranks(ranks: int) -> None:
    """Raises unless every rank has its own GPU."""
    import torch

    if on_gpus() and ranks > (gpus := torch.cuda.device_count()):
        raise ArgumentError(f"--ranks {ranks}: GPUs here: {gpus}; expected no more ranks, or DS_ACCELERATOR=cpu")


def measure(workload: Workload, ranks: int, timeout: float = 900.0) -> list[dict[str, Any]]:
    """Returns every rank's measurements, from processes on this machine over gloo on loopback."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes, processes = [], []
    for rank in range(ranks):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(theirs, workload, rank, ranks, port))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return [_receive(pipe, timeout, rank) for rank, pipe in enumerate(pipes)]
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


def _receive(pipe: Connection, timeout: float, rank: int) -> dict[str, Any]:
    try:
        if pipe.poll(timeout):
            good, value = pipe.recv()
            if good:
                return dict(value)
            raise SuperOffloadError(f"benchmarks.zero3: rank {rank}: {value}")
    except EOFError:
        raise SuperOffloadError(f"benchmarks.zero3: rank {rank} ended without a result") from None
    raise SuperOffloadError(f"benchmarks.zero3: rank {rank}: no result within {timeout:g} s")


def _rank(pipe: Connection, workload: Workload, rank: int, ranks: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_WAIT_POLICY="PASSIVE", DEEPSPEED_LOG_LEVEL="error",
    )  # fmt: skip
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if on_gpus() else "cpu")
    # DeepSpeed compiles its kernels with the ninja that was installed next to this Python.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    try:
        pipe.send((True, measure_rank(workload, rank, ranks)))
    except Exception as error:
        pipe.send((False, f"{type(error).__name__}: {error}"))
    pipe.close()
    os._exit(0)


def measure_rank(workload: Workload, rank: int, ranks: int) -> dict[str, Any]:
    """Returns every contestant's measurements on this rank, by name."""
    import warnings

    import deepspeed
    import torch

    import superoffload.integrations.deepspeed as ours

    warnings.filterwarnings("ignore", category=FutureWarning)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // ranks))
    if on_gpus():
        torch.cuda.set_device(rank)
    deepspeed.init_distributed("nccl" if on_gpus() else "gloo")
    entrants: dict[str, _Entrant] = {}
    for name in workload.contestants:
        (ours.disable if name == UPSTREAM else ours.enable)()
        entrants[name] = _Entrant(name, workload)
    for turn in range(workload.rounds + 1):
        for entrant in in_turn(list(entrants.values()), turn):
            entrant.turn(warm_up=turn == 0)
    return {name: entrant.result() for name, entrant in entrants.items()}


class _Entrant:
    """Trains one engine with its timers."""

    def __init__(self, name: str, workload: Workload) -> None:
        import deepspeed
        import torch

        self.workload = workload
        self.host_before, gpu_before = _resident(), _on_gpu()
        torch.manual_seed(1)
        model = _model(workload)
        self.engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=_config(name, workload)
        )
        self.gpu_at_rest = _on_gpu() - gpu_before
        self.gpu_bytes = 0
        self.step_times: list[list[float]] = []  # by turn
        self.part_times: list[list[float]] = []
        self.part = 0.0
        self.steps = 0
        self.loss = 0.0
        optimizer = self.engine.optimizer
        optimizer.partition_grads = self._timed(optimizer.partition_grads)
        optimizer.step = self._timed(optimizer.step)
        parts = getattr(optimizer, "parts", None)  # stock DeepSpeed's has none
        self.driver = None if parts is None else parts.driver
        if self.driver is not None:
            self.driver.deliver = self._timed(self.driver.deliver)

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        depth = 0

        def timed(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            began = time.perf_counter()
            depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                depth -= 1
                if depth == 0:
                    self.part += time.perf_counter() - began

        return timed

    def turn(self, *, warm_up: bool) -> None:
        import torch

        from superoffload.links.cuda.device import peak_active_bytes

        others = _on_gpu() - self.gpu_at_rest
        if on_gpus():
            torch.cuda.reset_peak_memory_stats()
        if not warm_up:
            self.step_times.append([])
            self.part_times.append([])
        for _ in range(max(_WARM_UP_STEPS, self.workload.steps) if warm_up else self.workload.steps):
            generator = torch.Generator().manual_seed(self.steps * 100 + self.engine.global_rank)
            batch = torch.randn(self.workload.tokens, self.workload.width, generator=generator)
            batch = batch.to(self.engine.device, self.engine.module.dtype)
            torch.distributed.barrier()
            _device_is_idle()
            self.part, began = 0.0, time.perf_counter()
            loss = self.engine(batch)
            self.engine.backward(loss)
            self.engine.step()
            _device_is_idle()
            if not warm_up:
                self.step_times[-1].append(time.perf_counter() - began)
                self.part_times[-1].append(self.part)
            self.steps += 1
            self.loss = float(loss.detach())
        if warm_up:
            self.host_bytes = _resident() - self.host_before
        if on_gpus():
            self.gpu_bytes = max(self.gpu_bytes, peak_active_bytes() - others)

    def result(self) -> dict[str, Any]:
        from superoffload import kernels

        stats = self.driver.engine.stats() if self.driver is not None else {}
        return {
            "steps": self.step_times,
            "parts": self.part_times,
            "loss": self.loss,
            "host_bytes": self.host_bytes,
            "gpu_bytes": self.gpu_bytes if on_gpus() else None,
            "numel": sum(param.ds_numel for param in self.engine.module.parameters()),
            "isa": kernels.current_isa() if self.driver is not None else None,
            "threads": self.driver.engine.pool.threads if self.driver is not None else None,
            "clip_rate": stats.get("clip_rate"),
        }


def _model(workload: Workload) -> Any:
    import torch
    from torch import nn

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(workload.width)
            self.up = nn.Linear(workload.width, 4 * workload.width)
            self.down = nn.Linear(4 * workload.width, workload.width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.down(torch.relu(self.up(self.norm(x))))
            return x + out

    class Model(nn.Module):
        """Predicts its own input, so that the loss falls."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(Layer() for _ in range(workload.layers)))
            self.dtype = torch.bfloat16 if workload.precision == "bf16" else torch.float32

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = (self.layers(x) - x.roll(1, -1)).float().square().mean()
            return loss

    return Model()


def _config(name: str, workload: Workload) -> dict[str, Any]:
    offload: dict[str, Any] = {"device": "superoffload" if name in (EAGER, LATER) else "cpu", "pin_memory": on_gpus()}
    if name == UPSTREAM:
        offload["super_offload"] = True
    size = 4 * workload.width * workload.width
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": workload.clip,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": offload,
            "reduce_bucket_size": size,
            "stage3_prefetch_bucket_size": size,
            "stage3_param_persistence_threshold": 10 * workload.width,
            # Upstream steps whole sub-groups: with a single one, it would step nothing before backward has ended.
            **({"sub_group_size": 2 * size} if name == UPSTREAM else {}),
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "bf16": {"enabled": workload.precision == "bf16"},
        "steps_per_print": 10**9,
    }
    if name in (EAGER, LATER):
        options: dict[str, Any] = {"delivery": "on_demand" if name == LATER else "eager"}
        if workload.threads is not None:
            options["threads"] = workload.threads
        config["superoffload"] = options
    return config


def _device_is_idle() -> None:
    if on_gpus():
        import torch

        torch.cuda.synchronize()


def _on_gpu() -> int:
    """Returns the bytes of this process on its GPU."""
    from superoffload.links.cuda.device import active_bytes

    return active_bytes() if on_gpus() else 0


def _resident() -> int:
    """Returns the bytes of this process in memory."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
