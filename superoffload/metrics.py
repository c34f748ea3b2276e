"""Collects what to watch while training: a plain dictionary per step, and a log line when steps are skipped or slow.

`Monitor(optimizer).step()` after every `optimizer.step()` returns values that TensorBoard and Weights & Biases log
unchanged; docs/metrics.md has every name with its unit.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Protocol

from superoffload.engine.stats import GAUGES, total
from superoffload.errors import ArgumentError

if TYPE_CHECKING:
    from superoffload.engine.verdict import Verdict

LOGGER = logging.getLogger("superoffload")
PREFIX = "superoffload/"

# What stats() returns: unit and meaning. All but GAUGES (engine/stats.py) count since construction.
TOTALS: Mapping[str, tuple[str, str]] = {
    "steps": ("steps", "finished with a verdict that let parameters change"),
    "skipped_steps": ("steps", "left out because a gradient or the norm was not finite"),
    "clipped_steps": ("steps", "whose clip coefficient was below 1"),
    "buckets_speculated": ("buckets", "given to the workers before the verdict, to step"),
    "buckets_committed": ("buckets", "speculated and kept"),
    "buckets_replayed": ("buckets", "speculated, undone and stepped again with the clip coefficient"),
    "buckets_undone": ("buckets", "speculated and taken back because something changed before the verdict"),
    "buckets_withdrawn": (
        "buckets",
        "speculated, begun by no worker before the verdict, stepped after; among buckets_undone",
    ),
    "buckets_skipped": ("buckets", "speculated and taken back because the step was skipped"),
    "buckets_abandoned": ("buckets", "speculated and taken back because step() was never called"),
    "buckets_stepped": ("buckets", "stepped after the verdict, in one pass"),
    "buckets_two_phase": ("buckets", "published after the verdict and settled behind the next forward and backward"),
    "journal_overflows": ("buckets", "undone at once because their journal was full; among buckets_undone"),
    "optimizer_seconds": ("seconds", "in which at least one worker thread was at work"),
    "optimizer_seconds_exposed": ("seconds", "in which the training thread waited for the optimizer or worked for it"),
    "bytes_down": ("bytes", "of gradients packed"),
    "bytes_up": ("bytes", "of parameters delivered, or sent up and discarded"),
    "bytes_up_early": ("bytes", "of bytes_up, sent before the verdict"),
    "journal_bytes": ("bytes", "written into journals of steps that ended"),
    "journal_bytes_per_param": ("bytes", "of the buckets speculated in the last step that speculated"),
    "journal_reserved_bytes": ("bytes", "of host memory that journals use or keep for the next steps"),
    "host_bytes": ("bytes", "of host memory in masters, moments, packed gradients, shadows and journals now"),
    "params_on_device": ("parameters", "whose state is on the accelerator now (placement)"),
    "pinned_bytes": (
        "bytes",
        "of host memory that are pinned for the accelerator now; 0 while parameters are on the CPU",
    ),
    "clip_rate": ("share", "clipped steps / decided steps"),
}
# Added by Monitor.step(), for the step since the previous call.
PER_STEP: Mapping[str, tuple[str, str]] = {
    "step_seconds": ("seconds", "wall time since the call before"),
    "step_optimizer_seconds_hidden": ("seconds", "worker threads at work beside the training thread"),
    "step_optimizer_seconds_exposed": ("seconds", "the training thread waited for the optimizer or worked for it"),
    "step_exposed_share": ("share", "of the step's wall time that is exposed optimizer time"),
    "step_down_bytes_per_second": ("bytes/s", "gradients packed, over the whole step"),
    "step_up_bytes_per_second": ("bytes/s", "parameters delivered, over the whole step"),
    "step_speculated_share": ("share", "of the buckets with gradients that workers had begun before the verdict"),
    "grad_norm": ("norm", "of the unscaled gradient before clipping; absent when not finite"),
    "clip_coefficient": ("factor", "1 where nothing was clipped"),
}


class Watched(Protocol):
    """Lists what a monitor asks of an optimizer."""

    def stats(self) -> dict[str, float | int]: ...
    @property
    def last_verdict(self) -> Verdict | None: ...


class Exporter(Protocol):
    """Publishes the metrics of each step, as `superoffload.exporter.PrometheusExporter` does."""

    def update(self, metrics: Mapping[str, float]) -> None: ...


def as_metrics(stats: Mapping[str, float | int]) -> dict[str, float]:
    """Returns totals as a logger takes them: finite numbers under one prefix."""
    return {PREFIX + name: float(value) for name, value in stats.items() if math.isfinite(value)}


@dataclass(frozen=True)
class Limits:
    """Defines when something is an anomaly; `window` and `patience` count steps."""

    window: int = 50
    patience: int = 10
    step_time_ratio: float = 1.5  # times the median of the window, for `patience` steps
    skipped_in_a_row: int = 3


class Monitor:
    """Reports the metrics of each step; call `step()` once after every `optimizer.step()`.

    Log lines name the rank if there are several; `rank` sets it for frameworks without torch.distributed.
    """

    def __init__(
        self,
        optimizer: Watched,
        *,
        limits: Limits | None = None,
        exporter: Exporter | None = None,
        rank: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not callable(getattr(optimizer, "stats", None)):
            raise ArgumentError(
                f"optimizer: {type(optimizer).__name__}, expected superoffload.AdamW; pass the .optimizer of a "
                "wrapper such as Accelerate's"
            )
        if limits is not None and not isinstance(limits, Limits):
            raise ArgumentError(f"limits: {type(limits).__name__}, expected superoffload.metrics.Limits(...)")
        self._optimizer = optimizer
        self._clock = clock
        self._exporter = exporter
        self._before = dict(optimizer.stats())
        self._earlier: dict[str, float] = {}  # what earlier runs counted
        self._time = clock()
        own_rank, ranks = _rank_and_ranks()
        self._rank = own_rank if rank is None else rank
        self._anomalies = Anomalies(limits or Limits(), f"rank {self._rank}: " if ranks > 1 or rank is not None else "")

    def step(self) -> dict[str, float]:
        """Returns the metrics of the step since the previous call; logs each anomaly once, when it begins."""
        now, stats = self._clock(), self._optimizer.stats()
        verdict = self._optimizer.last_verdict
        totals = total(stats, self._earlier)
        values = {
            **as_metrics(totals),
            **{PREFIX + name: value for name, value in self._of_step(stats, now - self._time, verdict).items()},
        }
        skipped = stats["skipped_steps"] > self._before["skipped_steps"]
        decided = int(totals["steps"] + totals["skipped_steps"])
        self._anomalies.observe(decided, now - self._time, skipped=skipped)
        self._before, self._time = dict(stats), now
        if self._exporter is not None:
            self._exporter.update(values)
        return values

    def state_dict(self) -> dict[str, float]:
        """Returns the counters so far, as plain numbers by name, for ``load_state_dict`` of the run that resumes."""
        return {
            name: value for name, value in total(self._optimizer.stats(), self._earlier).items() if name not in GAUGES
        }

    def load_state_dict(self, counters: Mapping[str, float]) -> None:
        """Continues the counters from an earlier run's ``state_dict``; ignores unknown names."""
        if not isinstance(counters, Mapping):
            raise ArgumentError(f"counters: {type(counters).__name__}, expected what Monitor.state_dict() returned")
        for name, value in counters.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise ArgumentError(f"counters: {name}={value!r}, expected a number of at least 0")
        stats = self._optimizer.stats()
        self._earlier = {name: counters.get(name, 0) - value for name, value in stats.items() if name not in GAUGES}

    def _of_step(self, stats: Mapping[str, float | int], seconds: float, verdict: Verdict | None) -> dict[str, float]:
        grown = {name: stats[name] - self._before[name] for name in stats}
        exposed = grown["optimizer_seconds_exposed"]
        waited = grown["buckets_stepped"] + grown["buckets_two_phase"]
        buckets = grown["buckets_speculated"] - grown["buckets_undone"] + waited
        begun = grown["buckets_speculated"] - grown["buckets_withdrawn"]
        values = {
            "step_seconds": seconds,
            "step_optimizer_seconds_hidden": max(0.0, grown["optimizer_seconds"] - exposed),
            "step_optimizer_seconds_exposed": exposed,
            "step_exposed_share": exposed / seconds if seconds > 0 else 0.0,
            "step_down_bytes_per_second": grown["bytes_down"] / seconds if seconds > 0 else 0.0,
            "step_up_bytes_per_second": grown["bytes_up"] / seconds if seconds > 0 else 0.0,
            "step_speculated_share": min(1.0, begun / buckets) if buckets > 0 else 0.0,
        }
        if verdict is not None:
            values["clip_coefficient"] = verdict.clip_coefficient
            if math.isfinite(verdict.grad_norm):
                values["grad_norm"] = verdict.grad_norm
        return values


class Anomalies:
    """Judges metrics step by step; logs one warning when an anomaly begins and one line when it is over."""

    def __init__(self, limits: Limits, prefix: str = "") -> None:
        self._limits = limits
        self._prefix = prefix
        self._seconds: deque[float] = deque(maxlen=limits.window)
        self._in_a_row = {"skipped steps": 0, "slow steps": 0}

    def observe(self, step: int, seconds: float, *, skipped: bool) -> None:
        limits = self._limits
        self._judge(
            step,
            "skipped steps",
            skipped,
            limits.skipped_in_a_row,
            f"{limits.skipped_in_a_row} steps in a row had NaN or Inf gradients and changed nothing; lower the "
            f"learning rate or the loss scale, and look at the data",
        )
        usual = median(self._seconds) if len(self._seconds) >= limits.patience else math.inf
        slow = seconds > limits.step_time_ratio * usual
        if not slow:  # slow steps must not shift the median
            self._seconds.append(seconds)
        self._judge(
            step,
            "slow steps",
            slow,
            limits.patience,
            f"steps take {seconds:.3g} s, usual were {usual:.3g} s; look at the load of the processors, and at trace=",
        )

    def _judge(self, step: int, name: str, holds: bool, patience: int, text: str) -> None:
        before = self._in_a_row[name]
        self._in_a_row[name] = before + 1 if holds else 0
        if self._in_a_row[name] == patience:
            LOGGER.warning("%sstep %d: %s: %s", self._prefix, step, name, text)
        elif not holds and before >= patience:
            LOGGER.info("%sstep %d: %s is over", self._prefix, step, name)


def _rank_and_ranks() -> tuple[int, int]:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
