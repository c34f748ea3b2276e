"""Measures what one more parameter tensor costs per step, beyond autograd.

Every contestant trains the same model: one module per parameter, each of which computes a scalar product. So autograd
costs little per parameter, and its graph is the same for all. Contestants take turns of a few steps, round by round; a
difference is taken within a round, and the median over the rounds is reported.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import command, style
from benchmarks.timing import in_turn, no_garbage_collection
from superoffload import AdamW, CPUAdamW, kernels
from superoffload.errors import ArgumentError, SuperOffloadError
from superoffload.host.processors import allowed_cpus

Row = dict[str, Any]
Seconds = dict[str, list[float]]  # of each phase, one per round

AUTOGRAD, FUSED, OURS, KERNELS = "autograd alone", "torch fused", "AdamW", "CPUAdamW"
ON_DEMAND = "AdamW, on demand"
CONTESTANTS = (AUTOGRAD, FUSED, OURS, KERNELS, ON_DEMAND)
PHASES = ("forward", "backward", "step", "zero_grad")
BOTH = ("backward", "step")

_NUMEL = 256  # elements per tensor
_WARM_UP = 4  # steps of each contestant: the first ones lay out buckets
_LR, _NEVER_CLIPS = 1e-4, 1e30
_UNWANTED = ("skipped_steps", "clipped_steps", "buckets_replayed")
# On one busy processor a bucket that no worker has begun by step() is undone and stepped then.
_FATES = ("buckets_speculated", "buckets_committed", "buckets_undone", "buckets_stepped", "journal_overflows")


def make_parser() -> argparse.ArgumentParser:
    parser = command.parser(
        "tensors",
        "Trains a model of many small fp32 parameters, one per module, and reports the microseconds per tensor that "
        "torch's fused AdamW, AdamW and CPUAdamW add to backward and step(), beyond autograd alone, and those per "
        "module that on-demand delivery adds to eager delivery. By default all of it runs on one processor.",
    )
    counts = (250, 1000, 2000, 5000, 20000)
    parser.add_argument("--counts", type=int, nargs="+", metavar="N", default=counts, help="tensors of the model")
    command.add_option(
        parser,
        "--idle",
        type=float,
        default=0.0,
        help="share of the tensors that get no gradient in a step, as experts without a token; others in each step",
    )
    command.add_option(parser, "--processors", type=int, default=1, help="for torch, worker threads and the rest")
    command.add_option(parser, "--rounds", type=int, default=7, help="turns of each contestant")
    command.add_option(parser, "--steps", type=int, default=3, help="per turn")
    return parser


class _ScalarProduct(nn.Module):
    """Holds one parameter; its gradient is ``x``."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(numel))

    def forward(self, x: Tensor) -> Tensor:
        return torch.dot(self.weight, x)


class _Model(nn.Module):
    """Sums one scalar product per parameter that is used."""

    def __init__(self, count: int, numel: int) -> None:
        super().__init__()
        self.products = nn.ModuleList(_ScalarProduct(numel) for _ in range(count))

    def forward(self, x: Tensor, used: Sequence[int]) -> Tensor:
        return torch.stack([self.products[number](x) for number in used]).sum()


class _NoOptimizer:
    """Drops gradients, so that autograd does not add to them, and changes nothing."""

    def __init__(self, model: nn.Module) -> None:
        self._params = list(model.parameters())

    def step(self) -> None: ...

    def zero_grad(self) -> None:
        for param in self._params:
            param.grad = None


def _optimizer(name: str, model: nn.Module, threads: int) -> Any:
    if name == AUTOGRAD:
        return _NoOptimizer(model)
    if name == FUSED:
        return torch.optim.AdamW(model.parameters(), lr=_LR, fused=True)
    if name == KERNELS:
        return CPUAdamW(model.parameters(), lr=_LR, threads=threads)
    options: dict[str, Any] = {"lr": _LR, "max_grad_norm": _NEVER_CLIPS, "speculation": "always", "threads": threads}
    if name == ON_DEMAND:
        options |= {"delivery": "on_demand", "module": model}
    return AdamW(model.parameters(), **options)


class _Contestant:
    """Owns a model with its optimizer, and the seconds of each phase."""

    def __init__(self, name: str, args: argparse.Namespace, count: int) -> None:
        self.name = name
        self.seconds: Seconds = {phase: [] for phase in PHASES}
        self._count, self._used = count, max(1, count - round(args.idle * count))
        self._random = random.Random(0)  # the same for all contestants
        self._model = _Model(count, _NUMEL)
        self._x = torch.randn(_NUMEL, generator=torch.Generator().manual_seed(0))
        self.optimizer = _optimizer(name, self._model, args.processors)
        for _ in range(_WARM_UP):
            self._step()
        self._before = self._totals()

    def turn(self, steps: int) -> None:
        """Takes one step more than it counts: the first one after another contestant's finds cold caches."""
        samples = [self._step() for _ in range(steps + 1)][1:]
        for phase, of_phase in zip(PHASES, zip(*samples, strict=True), strict=True):
            self.seconds[phase].append(median(of_phase))
        if isinstance(self.optimizer, AdamW):
            self.optimizer.synchronize()  # so that worker threads have nothing to do while others are timed

    def _step(self) -> list[float]:
        """Returns the duration of each phase."""
        used = sorted(self._random.sample(range(self._count), self._used))
        times = [time.perf_counter()]
        loss = self._model(self._x, used)
        times.append(time.perf_counter())
        for phase in (loss.backward, self.optimizer.step, self.optimizer.zero_grad):
            phase()
            times.append(time.perf_counter())
        return [after - before for before, after in pairwise(times)]

    def _totals(self) -> dict[str, float]:
        return dict(self.optimizer.stats()) if isinstance(self.optimizer, AdamW) else {}

    def fates(self) -> dict[str, float]:
        """Returns the fates of buckets since the first steps; raises if these were not the steps to be measured."""
        since = {name: total - self._before[name] for name, total in self._totals().items()}
        if any(since.get(name) for name in _UNWANTED):
            raise SuperOffloadError(f"{self.name} did more than speculate and commit; nothing was measured")
        return {name: since[name] for name in _FATES if name in since}


def run(args: argparse.Namespace) -> Row:
    command.positive(args, "counts", "processors", "rounds", "steps")
    cpus = allowed_cpus()[: args.processors]
    if len(cpus) < args.processors or not 0.0 <= args.idle < 1.0:
        raise ArgumentError(f"processors={args.processors}, idle={args.idle}: more than there are, or no share below 1")
    if args.quick:
        args.counts, args.rounds, args.steps = [50, 200], 2, 1
    os.sched_setaffinity(0, cpus)  # worker threads follow
    torch.set_num_threads(len(cpus))
    print(f"{'':24}{'milliseconds of':^44}microseconds per tensor beyond autograd")
    names = (*PHASES, "bwd+step", "x fused", "per module")
    print(f"{'tensors':>7} {'':16}" + "".join(f"{name:>11}" for name in names))
    rows: list[Row] = []
    with no_garbage_collection():  # it would hit one contestant and not the others
        for count in sorted(set(args.counts)):
            rows += _measure(args, count)
            gc.collect()
    settings = {"numel": _NUMEL, **{key: getattr(args, key) for key in ("idle", "rounds", "steps")}}
    return {"settings": {**settings, "cpus": list(cpus)}, "rows": rows}


def _measure(args: argparse.Namespace, count: int) -> list[Row]:
    with ExitStack() as stack:
        found: dict[str, _Contestant] = {}
        for name in CONTESTANTS:
            found[name] = _Contestant(name, args, count)
            if isinstance(found[name].optimizer, AdamW | CPUAdamW):
                stack.callback(found[name].optimizer.close)
        for number in range(args.rounds):
            for name in in_turn(CONTESTANTS, number):
                found[name].turn(args.steps)
        rows = [_row(found, name, args, count) for name in CONTESTANTS]
    for row in rows:
        print(_line(row), flush=True)
    return rows


def _row(found: Mapping[str, _Contestant], name: str, args: argparse.Namespace, count: int) -> Row:
    """``seconds_per_tensor``: of backward and step() beyond autograd; ``ratio``: that, over what torch's fused AdamW
    adds, unless noise hides this. ``seconds_per_module``: what on-demand delivery adds to the whole eager step."""
    one = found[name]
    whole = [sum(seconds) for seconds in zip(*one.seconds.values(), strict=True)]
    row: Row = {
        "name": name,
        "isa": kernels.current_isa() if name in (OURS, KERNELS, ON_DEMAND) else "",
        "threads": args.processors,
        "tensors": count,
        "numel": count * _NUMEL,
        "idle": args.idle,
        "samples": len(whole),
        "seconds_median": median(whole),
        "seconds_min": min(whole),
        "phases": {phase: median(seconds) for phase, seconds in one.seconds.items()},
        "ratio_to": FUSED,
        "fates": one.fates(),
    }
    alone = found[AUTOGRAD].seconds
    added, by_fused = (median(_beyond(found[who].seconds, alone, count, BOTH)) for who in (name, FUSED))
    more = _beyond(one.seconds, found[OURS].seconds, count, PHASES)
    row["seconds_per_tensor"] = added
    row["ratio"] = added / by_fused if name != AUTOGRAD and by_fused > 0 else None
    row["seconds_per_module"] = median(more) if name == ON_DEMAND else None
    return row


def _beyond(mine: Seconds, theirs: Seconds, count: int, phases: Sequence[str]) -> list[float]:
    """Returns how many more seconds per tensor one contestant takes than another in these phases, one per round."""
    rounds = range(len(mine[phases[0]]))
    return [sum(mine[phase][number] - theirs[phase][number] for phase in phases) / count for number in rounds]


def _line(row: Row) -> str:
    cells = [f"{1e3 * row['phases'][phase]:.3f}" for phase in PHASES]
    if row["name"] != AUTOGRAD:
        cells += [f"{1e6 * row['seconds_per_tensor']:.1f}", "" if row["ratio"] is None else f"{row['ratio']:.2f}"]
    if row["seconds_per_module"] is not None:
        cells.append(f"{1e6 * row['seconds_per_module']:.1f}")
    return f"{row['tensors']:>7,} {row['name']:16}" + "".join(f"{cell:>11}" for cell in cells)


def plot(report: Row, path: Path) -> None:
    """Draws the cost per tensor by the number of tensors."""
    looks = {FUSED: (style.MUTED, "o-"), KERNELS: (style.GREEN, "o-"), OURS: (style.BLUE, "o-")}
    with style.drawing(path, 7.5, 4.2) as figure:
        axes = figure.subplots()
        for name, (colour, line) in {**looks, ON_DEMAND: (style.ORANGE, "o--")}.items():
            key = "seconds_per_module" if name == ON_DEMAND else "seconds_per_tensor"
            points = [(row["tensors"], 1e6 * row[key]) for row in report["rows"] if row["name"] == name]
            label = "on demand beyond eager, whole step" if name == ON_DEMAND else name
            axes.plot(*zip(*points, strict=True), line, color=colour, markersize=4, linewidth=1.4, label=label)
        counts = sorted({row["tensors"] for row in report["rows"]})
        axes.set_xscale("log")
        axes.set_xticks(counts, [f"{count:,}" for count in counts])
        axes.minorticks_off()
        axes.set_ylim(min(0.0, axes.get_ylim()[0]), 1.3 * axes.get_ylim()[1])  # room for the legend
        axes.set_xlabel("parameter tensors")
        axes.set_ylabel("microseconds, backward and step()")
        axes.set_title("Cost per tensor beyond autograd")
        axes.legend(loc="upper left", ncols=2)


if __name__ == "__main__":
    raise SystemExit(command.start(make_parser(), run, plot))
