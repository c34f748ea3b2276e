"""Measures DeepSpeed ZeRO with stock CPU offload and with superoffload in the same processes, steps taken in turn.

Everything runs on this machine's processors, over gloo; the GPU suite measures GPUs. The optimizer part is the time of
the training thread where gradients go to host memory and are measured, in the optimizer's
``step()`` and, with on-demand delivery, in waiting for parameters. The first steps, whose ranks are compared in full,
are warm-up.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import command
from benchmarks.timing import Stopwatch, in_turn
from superoffload import kernels
from superoffload.errors import ArgumentError
from tests.convergence.local_ranks import LocalRanks

STOCK, EAGER, LATER = "stock", "superoffload", "superoffload, on demand"
CONTESTANTS = (STOCK, EAGER, LATER)
CLIPS = (0.0, 0.05)  # thresholds; 0: no clipping
_WARM_UP_STEPS = 4

Row = dict[str, Any]
Turns = Sequence[Sequence[float]]


def make_parser() -> argparse.ArgumentParser:
    parser = command.parser(
        "zero",
        "Trains one model under DeepSpeed ZeRO with stock CPU offload and with superoffload, eager and on demand, in "
        "the same processes, steps taken in turn. Ratios are those of turns side by side.",
        plot=False,
    )
    parser.add_argument("--stage", type=int, nargs="+", default=[3], choices=[1, 2, 3], help="of ZeRO; each measured")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], metavar="N", help="each measured")
    parser.add_argument(
        "--offload-param", action="store_true", help="stage 3 keeps parameters in host memory, and no other is measured"
    )
    command.add_option(parser, "--rounds", type=int, default=8, help="turns of each contestant")
    command.add_option(parser, "--steps", type=int, default=3, help="per turn")
    return parser


class Workload(NamedTuple):
    stage: int
    width: int  # of the hidden layers
    layers: int  # of 8 width^2 parameters each
    tokens: int  # per rank and step
    rounds: int  # measured turns of each contestant
    steps: int  # per turn
    clip: float
    offload_param: bool = False


def measure_rank(workload: Workload) -> dict[str, Row]:
    """Returns every contestant's measurements on this rank, by name."""
    os.environ.update(DS_ACCELERATOR="cpu", DEEPSPEED_LOG_LEVEL="error", LOCAL_SIZE=os.environ["LOCAL_WORLD_SIZE"])
    # DeepSpeed compiles its kernels with the ninja that was installed next to this Python.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    warnings.filterwarnings("ignore", category=FutureWarning)
    import deepspeed

    import superoffload.integrations.deepspeed as ours

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // torch.distributed.get_world_size()))
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    ours.enable()
    entrants = {name: _Entrant(name, workload) for name in CONTESTANTS}
    for turn in range(workload.rounds + 1):
        for entrant in in_turn(list(entrants.values()), turn):
            entrant.turn(warm_up=turn == 0)
    return {name: entrant.result() for name, entrant in entrants.items()}


class _Entrant:
    """Trains one engine with its timers."""

    def __init__(self, name: str, workload: Workload) -> None:
        import deepspeed

        self.workload = workload
        self.host_before = _resident()
        torch.manual_seed(1)
        model = _Model(workload)
        self.engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=_config(name, workload)
        )
        self.step_times: list[list[float]] = []  # by turn
        self.part_times: list[list[float]] = []
        self.part, self.steps, self.loss = Stopwatch(), 0, 0.0
        optimizer = self.engine.optimizer
        takes = "partition_grads" if workload.stage == 3 else "copy_grads_in_partition"
        self.part.wrap(optimizer, takes, "step")
        parts = getattr(optimizer, "parts", None)  # stock DeepSpeed's has none
        self.driver = None if parts is None else parts.driver
        if self.driver is not None:
            self.part.wrap(self.driver, "deliver")

    def turn(self, *, warm_up: bool) -> None:
        if not warm_up:
            self.step_times.append([])
            self.part_times.append([])
        for _ in range(max(_WARM_UP_STEPS, self.workload.steps) if warm_up else self.workload.steps):
            generator = torch.Generator().manual_seed(self.steps * 100 + self.engine.global_rank)
            batch = torch.randn(self.workload.tokens, self.workload.width, generator=generator).bfloat16()
            torch.distributed.barrier()
            self.part.seconds, began = 0.0, time.perf_counter()
            loss = self.engine(batch)
            self.engine.backward(loss)
            self.engine.step()
            if not warm_up:
                self.step_times[-1].append(time.perf_counter() - began)
                self.part_times[-1].append(self.part.seconds)
            self.steps += 1
            self.loss = float(loss.detach())
        if warm_up:
            self.host_bytes = _resident() - self.host_before

    def result(self) -> Row:
        engine = None if self.driver is None else self.driver.engine
        return {
            "steps": self.step_times,
            "parts": self.part_times,
            "loss": self.loss,
            "host_bytes": self.host_bytes,
            "numel": sum(getattr(param, "ds_numel", param.numel()) for param in self.engine.module.parameters()),
            "isa": None if engine is None else kernels.current_isa(),
            "threads": None if engine is None else engine.pool.threads,
            "clip_rate": None if engine is None else engine.stats().get("clip_rate"),
        }


class _Model(nn.Module):
    """Predicts its own input, so that the loss falls."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        width = workload.width
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
            for _ in range(workload.layers)
        )
        self.dtype = torch.bfloat16

    def forward(self, batch: Tensor) -> Tensor:
        x = batch
        for layer in self.layers:
            x = x + layer(x)
        return (x - batch.roll(1, -1)).float().square().mean()


def _config(name: str, workload: Workload) -> dict[str, Any]:
    size = 4 * workload.width * workload.width
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": workload.clip,
        "zero_optimization": {
            "stage": workload.stage,
            "offload_optimizer": {"device": "cpu" if name == STOCK else "superoffload", "pin_memory": False},
            "reduce_bucket_size": size,
            "stage3_prefetch_bucket_size": size,
            "stage3_param_persistence_threshold": 10 * workload.width,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "bf16": {"enabled": True},
        "steps_per_print": 10**9,
    }
    if workload.offload_param:
        config["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": False}
    if name != STOCK:
        config["superoffload"] = {"delivery": "on_demand" if name == LATER else "eager"}
    return config


def _resident() -> int:
    """Returns the bytes of this process in memory."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ---- rows -----------------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> Row:
    command.positive(args, "ranks", "rounds", "steps")
    if find_spec("deepspeed") is None:
        raise ArgumentError("needs DeepSpeed: pip install deepspeed==0.19.8")
    sizes: tuple[int, int, int, int, int] = (64, 1, 16, 1, 1) if args.quick else (768, 4, 256, args.rounds, args.steps)
    if args.offload_param and args.stage != [3]:
        raise ArgumentError(f"--offload-param: --stage {' '.join(map(str, args.stage))}: expected 3 alone")
    rows: list[Row] = []
    cases = [(stage, ranks) for stage in args.stage for ranks in args.ranks]
    for stage, ranks in [(2, 1), (3, 1)] if args.quick else cases:
        for clip in CLIPS[:1] if args.quick else CLIPS:
            workload = Workload(stage, *sizes, clip, args.offload_param and stage == 3)
            with LocalRanks(ranks) as local:
                found = local.run(measure_rank, workload, limit=900.0)
            for name in CONTESTANTS:
                rows.append(_row(name, ranks, workload, found))
                print(_line(rows[-1]), flush=True)
    return {"deepspeed": metadata.version("deepspeed"), "rows": rows}


def _row(name: str, ranks: int, workload: Workload, found: Sequence[dict[str, Row]]) -> Row:
    """Returns the first rank's measurements, with the memory of all ranks."""
    mine, stock = found[0][name], found[0][STOCK]
    times: dict[str, list[float]] = {
        key: [seconds for turn in mine[part] for seconds in turn]
        for key, part in (("seconds", "steps"), ("optimizer_seconds", "parts"))
    }
    return {
        "name": name,
        "stage": workload.stage,
        "offload_param": workload.offload_param,
        "ranks": ranks,
        "clip": workload.clip or None,
        "precision": "bf16",
        **{key: mine[key] for key in ("isa", "threads", "numel", "loss", "clip_rate")},
        "tokens": workload.tokens,
        **{f"{key}_median": statistics.median(seconds) for key, seconds in times.items()},
        **{f"{key}_min": min(seconds) for key, seconds in times.items()},
        "host_bytes": sum(rank[name]["host_bytes"] for rank in found),
        "ratio_to": STOCK,
        "ratio": _ratio(mine["steps"], stock["steps"]),
        "optimizer_ratio": _ratio(mine["parts"], stock["parts"]),
    }


def _ratio(mine: Turns, theirs: Turns) -> float:
    """Compares turns taken side by side, so that a machine that becomes slower or faster affects both."""
    pairs = zip(mine, theirs, strict=True)
    return statistics.median(statistics.median(ours) / statistics.median(stock) for ours, stock in pairs)


def _clip(row: Row) -> str:
    return "no clipping" if row["clip"] is None else f"clip {row['clip']:g}"


def _line(row: Row) -> str:
    return (
        f"ZeRO-{row['stage']}, {row['ranks']} ranks, {_clip(row):12} {row['name']:24} "
        f"step {1e3 * row['seconds_median']:7.1f} ms "
        f"(x {row['ratio']:.2f})  optimizer {1e3 * row['optimizer_seconds_median']:7.1f} ms "
        f"(x {row['optimizer_ratio']:.2f})  host {row['host_bytes'] / 2**20:6.0f} MiB  loss {row['loss']:.4f}"
    )


if __name__ == "__main__":
    raise SystemExit(command.start(make_parser(), run))
