"""Measures for `python -m benchmarks.tensors` what one more parameter tensor costs per step, beyond autograd.

Every contestant trains the same model: one module per parameter, each of which computes a scalar product. So autograd
costs little per parameter, and its graph is the same for all. Contestants take turns of a few steps, round by round; a
difference is taken within a round, and the median over the rounds is reported.
"""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from benchmarks.timing import in_turn, no_garbage_collection
from superoffload import AdamW, CPUAdamW, kernels
from superoffload.errors import ArgumentError, SuperOffloadError

Row = dict[str, Any]
Tell = Callable[[str], None]
Seconds = dict[str, list[float]]  # of each phase, one per round

AUTOGRAD, FUSED, OURS, KERNELS, ON_DEMAND = (
    "autograd alone", "torch fused", "AdamW", "CPUAdamW", "AdamW, on demand",
)  # fmt: skip
CONTESTANTS = (AUTOGRAD, FUSED, OURS, KERNELS, ON_DEMAND)
PHASES = ("forward", "backward", "step", "zero_grad")

_WARM_UP = 4  # steps of each contestant: the first ones lay out buckets
_LR, _NEVER_CLIPS = 1e-4, 1e30
# Of all contestants together: values, gradients and states per element; modules, graph and book-keeping per tensor.
_BYTES_PER_ELEMENT, _BYTES_PER_TENSOR = 112, 50_000
_UNWANTED = ("skipped_steps", "clipped_steps", "buckets_replayed")
# On one busy processor a bucket that no worker has begun by step() is undone and stepped then.
_FATES = ("buckets_speculated", "buckets_committed", "buckets_undone", "buckets_stepped", "journal_overflows")


@dataclass(frozen=True)
class TensorsBenchmark:
    """Configures the benchmark. ``numel``: elements per tensor; ``cpus``: the processors that everything runs on;
    ``idle``: the share of the tensors that get no gradient in a step, as experts without a token, others each time."""

    counts: Sequence[int]
    numel: int
    cpus: Sequence[int]
    rounds: int
    steps: int
    idle: float = 0.0


def check_memory(counts: Sequence[int], numel: int, available: int | None) -> None:
    """Raises ArgumentError if the contestants would not fit into memory."""
    needed = max(counts) * (numel * _BYTES_PER_ELEMENT + _BYTES_PER_TENSOR)
    if available is not None and needed > 0.8 * available:
        raise ArgumentError(
            f"counts={max(counts)}, numel={numel}: the contestants take {needed / 2**30:.1f} GiB, and "
            f"{available / 2**30:.1f} GiB are free; choose fewer"
        )


def run_tensors(settings: TensorsBenchmark, tell: Tell) -> list[Row]:
    """Returns one row per number of tensors and contestant."""
    rows: list[Row] = []
    with _bound_to(settings.cpus):
        for count in settings.counts:
            rows += _measure(settings, count, tell)
    return rows


@contextmanager
def _bound_to(cpus: Sequence[int]) -> Iterator[None]:
    """Binds this thread to these processors and gives torch as many threads; new worker threads follow."""
    allowed, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, cpus)
    torch.set_num_threads(len(cpus))
    try:
        with no_garbage_collection():  # it would hit one contestant and not the others
            yield
    finally:
        torch.set_num_threads(threads)
        os.sched_setaffinity(0, allowed)


# ---- contestants ------------------------------------------------------------------------------------------------


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


class _Optimizer(Protocol):
    def step(self) -> Any: ...

    def zero_grad(self) -> None: ...


class _NoOptimizer:
    """Drops gradients, so that autograd does not add to them, and changes nothing."""

    def __init__(self, model: nn.Module) -> None:
        self._params = list(model.parameters())

    def step(self) -> None: ...

    def zero_grad(self) -> None:
        for param in self._params:
            param.grad = None


def _optimizer(name: str, model: nn.Module, threads: int) -> _Optimizer:
    if name == AUTOGRAD:
        return _NoOptimizer(model)
    if name == FUSED:
        return torch.optim.AdamW(model.parameters(), lr=_LR, fused=True)
    if name == KERNELS:
        return CPUAdamW(model.parameters(), lr=_LR, threads=threads)
    on_demand: dict[str, Any] = {"delivery": "on_demand", "module": model} if name == ON_DEMAND else {}
    return AdamW(
        model.parameters(), lr=_LR, max_grad_norm=_NEVER_CLIPS, speculation="always", threads=threads, **on_demand
    )


def _now() -> tuple[float, float]:
    """Returns elapsed time and this process's processor time, which stands still while other programs run."""
    return time.perf_counter(), time.process_time()


class _Contestant:
    """Owns a model with its optimizer, and the seconds of each phase, one per round: elapsed, and of the processor."""

    def __init__(self, name: str, settings: TensorsBenchmark, count: int) -> None:
        self.name = name
        self.seconds: Seconds = {phase: [] for phase in PHASES}
        self.processor_seconds: Seconds = {phase: [] for phase in PHASES}
        self._count, self._used = count, max(1, count - round(settings.idle * count))
        self._random = random.Random(0)  # the same for all contestants
        self._model = _Model(count, settings.numel)
        self._x = torch.randn(settings.numel, generator=torch.Generator().manual_seed(0))
        self._optimizer = _optimizer(name, self._model, len(settings.cpus))

    def warm_up(self) -> None:
        for _ in range(_WARM_UP):
            self._step()
        self._before = self._totals()

    def turn(self, steps: int) -> None:
        """Takes one step more than it counts: the first one after another contestant's finds cold caches."""
        samples = [self._step() for _ in range(steps + 1)][1:]
        for phase, of_phase in zip(PHASES, zip(*samples, strict=True), strict=True):
            elapsed, used = zip(*of_phase, strict=True)
            self.seconds[phase].append(median(elapsed))
            self.processor_seconds[phase].append(median(used))
        self._rest()

    def _step(self) -> list[tuple[float, float]]:
        """Returns the two durations of each phase."""
        used = sorted(self._random.sample(range(self._count), self._used))
        times = [_now()]
        loss = self._model(self._x, used)
        times.append(_now())
        loss.backward()
        times.append(_now())
        self._optimizer.step()
        times.append(_now())
        self._optimizer.zero_grad()
        times.append(_now())
        return [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(times)]

    def _rest(self) -> None:
        """Waits until worker threads have nothing to do while others are timed."""
        if isinstance(self._optimizer, AdamW):
            self._optimizer.synchronize()

    def _totals(self) -> dict[str, float]:
        return dict(self._optimizer.stats()) if isinstance(self._optimizer, AdamW) else {}

    def fates(self) -> dict[str, float]:
        """Returns the fates of buckets since the first steps; raises if these were not the steps to be measured."""
        since = {name: total - self._before[name] for name, total in self._totals().items()}
        unwanted = [f"{name} {since[name]:g}" for name in _UNWANTED if since.get(name)]
        if unwanted:
            raise SuperOffloadError(
                f"{self.name} did more than speculate and commit ({', '.join(unwanted)}); nothing was measured"
            )
        return {name: since[name] for name in _FATES if name in since}

    def close(self) -> None:
        if isinstance(self._optimizer, AdamW | CPUAdamW):
            self._optimizer.close()


def _measure(settings: TensorsBenchmark, count: int, tell: Tell) -> list[Row]:
    with ExitStack() as stack:
        found: dict[str, _Contestant] = {}
        for name in CONTESTANTS:
            tell(f"{count:,} tensors: {name}, first steps")
            found[name] = _Contestant(name, settings, count)
            stack.callback(found[name].close)
            found[name].warm_up()
        for number in range(settings.rounds):
            tell(f"{count:,} tensors: round {number + 1} of {settings.rounds}")
            for name in in_turn(CONTESTANTS, number):
                found[name].turn(settings.steps)
        rows = rows_of(found, settings, count)
    gc.collect()
    return rows


# ---- rows -------------------------------------------------------------------------------------------------------


class Measured(Protocol):
    """Describes the results of a contestant."""

    seconds: Seconds
    processor_seconds: Seconds

    def fates(self) -> dict[str, float]: ...


def rows_of(found: Mapping[str, Measured], settings: TensorsBenchmark, count: int) -> list[Row]:
    """Returns a row per contestant. ``seconds_per_tensor``: of backward and step() beyond autograd; ``ratio``: that,
    over what torch's fused AdamW adds, unless noise hides this. ``processor_*``: the same in processor time of the
    process, which other programs hardly change. ``seconds_per_module``: what on-demand delivery adds to the whole step,
    compared with eager delivery."""
    alone = found[AUTOGRAD]
    added = {name: _beyond(one.seconds, alone.seconds, count, "backward", "step") for name, one in found.items()}
    used = {
        name: _beyond(one.processor_seconds, alone.processor_seconds, count, "backward", "step")
        for name, one in found.items()
    }
    rows = []
    for name, one in found.items():
        whole = [sum(seconds) for seconds in zip(*one.seconds.values(), strict=True)]
        per_module = per_module_used = None
        if name == ON_DEMAND:
            eager = found[OURS]
            per_module = median(_beyond(one.seconds, eager.seconds, count, *PHASES))
            per_module_used = median(_beyond(one.processor_seconds, eager.processor_seconds, count, *PHASES))
        rows.append(
            {
                "name": name,
                "isa": kernels.current_isa() if name in (OURS, KERNELS, ON_DEMAND) else "",
                "threads": len(settings.cpus),
                "tensors": count,
                "numel": count * settings.numel,
                "idle": settings.idle,
                "samples": len(whole),
                "seconds_median": median(whole),
                "seconds_min": min(whole),
                "phases": {phase: median(seconds) for phase, seconds in one.seconds.items()},
                "seconds_per_tensor": median(added[name]),
                "seconds_per_tensor_min": min(added[name]),
                "seconds_per_tensor_of": {
                    phase: median(_beyond(one.seconds, alone.seconds, count, phase)) for phase in PHASES
                },
                "processor_seconds_per_tensor": median(used[name]),
                "seconds_per_module": per_module,
                "processor_seconds_per_module": per_module_used,
                "ratio_to": FUSED,
                "ratio": _ratio(name, added),
                "processor_ratio": _ratio(name, used),
                "fates": one.fates(),
            }
        )
    return rows


def _ratio(name: str, added: Mapping[str, Sequence[float]]) -> float | None:
    fused = median(added[FUSED])
    return median(added[name]) / fused if name != AUTOGRAD and fused > 0 else None


def _beyond(mine: Seconds, theirs: Seconds, count: int, *phases: str) -> list[float]:
    """Returns how many more seconds per tensor one contestant takes than another in these phases, one per round."""
    differences: list[float] = []
    for number in range(len(mine[phases[0]])):
        more = (mine[phase][number] - theirs[phase][number] for phase in phases)
        differences.append(sum(more) / count)
    return differences
