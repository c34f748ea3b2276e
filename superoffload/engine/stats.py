"""The engine counts totals since construction, which ``AdamW.stats()`` reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass
class Stats:
    """Counts buckets and steps; times are in seconds, sizes in bytes. ``GAUGES`` below are values of now.

    buckets_two_phase were published right after the verdict and settled behind the next forward. buckets_undone include
    buckets_withdrawn, which no worker had begun when the verdict came.

    Once every step has ended, buckets_speculated = buckets_committed + buckets_replayed + buckets_undone +
    buckets_skipped + buckets_abandoned.
    """

    steps: int = 0
    skipped_steps: int = 0
    clipped_steps: int = 0
    buckets_speculated: int = 0
    buckets_committed: int = 0
    buckets_replayed: int = 0
    buckets_undone: int = 0
    buckets_withdrawn: int = 0
    buckets_skipped: int = 0
    buckets_abandoned: int = 0
    buckets_stepped: int = 0
    buckets_two_phase: int = 0
    journal_overflows: int = 0
    optimizer_seconds: float = 0.0
    optimizer_seconds_exposed: float = 0.0
    params_on_device: int = 0  # parameters whose state is on the accelerator now (placement)
    pinned_bytes: int = 0  # of host memory, now (CUDA link)
    host_bytes: int = 0  # of masters, moments, packed gradients, shadows and journals, now
    bytes_down: int = 0
    bytes_up: int = 0
    bytes_up_early: int = 0  # part of bytes_up: before the verdict, even if it discarded them (CUDA link)
    journal_bytes: int = 0
    journal_bytes_per_param: float = 0.0  # in the last step that speculated
    journal_reserved_bytes: int = 0  # of host memory, now

    def add(self, **amounts: float) -> None:
        """Adds these amounts to the totals of the same names."""
        for name, amount in amounts.items():
            setattr(self, name, getattr(self, name) + amount)

    def set(self, **values: float) -> None:
        """Sets totals that other parts count."""
        for name, value in values.items():
            setattr(self, name, value)

    def as_dict(self) -> dict[str, float | int]:
        """Returns a plain dictionary, with ``clip_rate`` = clipped steps / decided steps."""
        return _with_clip_rate(vars(self))


# What stats() returns beside totals: values of now, and a rate. They can fall.
GAUGES = (
    "journal_bytes_per_param",
    "journal_reserved_bytes",
    "host_bytes",
    "params_on_device",
    "pinned_bytes",
    "clip_rate",
)


def total(stats: Mapping[str, float | int], earlier: Mapping[str, float | int]) -> dict[str, float | int]:
    """Adds the totals of an engine that has ended, or of an earlier run, to those of the one that goes on."""
    return _with_clip_rate(
        {name: value if name in GAUGES else value + earlier.get(name, 0) for name, value in stats.items()}
    )


def _with_clip_rate(stats: Mapping[str, float | int]) -> dict[str, float | int]:
    decided = stats["steps"] + stats["skipped_steps"]
    return {**stats, "clip_rate": stats["clipped_steps"] / decided if decided else 0.0}
