"""The state of some parameters stays on the accelerator, chosen from the end of backward.

Nothing hides the step of the buckets that backward completes last. With master and moments next to the parameter they
cost the processors, the link and host memory nothing: the accelerator steps them after the verdict, with the same
arithmetic and so the same bits (csrc/cuda/step.cuh).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from superoffload.engine.bucket import Bucket, Shard, aligned
from superoffload.engine.moments import stored_numel
from superoffload.errors import ArgumentError, KernelsUnavailable
from superoffload.host.memory import host_empty, host_zeros
from superoffload.host.numbers import as_float
from superoffload.links.base import Link

STEPS_MEASURED = 3  # between the step that shows the order and the choice
SHARE_OF_FREE_MEMORY = 0.5  # at most this share: later batches may need more memory


@dataclass(frozen=True)
class Measured:
    """Holds the measurements for "auto". Times are seconds per step; ``optimizer`` is one plain pass on the host."""

    backward: float
    optimizer: float
    free_bytes: int
    numel: int
    bytes_per_param: float  # of state and packed gradient on the device
    buckets: int


def choose_fraction(measured: Measured) -> tuple[float, str]:
    """Returns the fraction and the reason for it.

    The fraction is so large that the processors finish the other buckets by the end of backward. It is at least one
    bucket, since nothing hides the step of the last one, and at most what half of the free memory holds.
    """
    behind = 1.0 - measured.backward / measured.optimizer if measured.optimizer > 0 else 0.0
    wanted = max(behind, 1.0 / measured.buckets, 0.0)
    free = max(0, measured.free_bytes)
    room = SHARE_OF_FREE_MEMORY * free / (measured.bytes_per_param * measured.numel)
    fraction = min(wanted, room, 1.0)
    why = (
        f"one pass on the processors takes {measured.optimizer:.4g} s and backward {measured.backward:.4g} s, so "
        f"{wanted:.1%} of the state would best stay on the accelerator; half of its {free / 2**30:.2f} "
        f"GiB of unused memory holds {min(room, 1.0):.1%}"
    )
    return fraction, why


AUTO = "auto"

Asked = float | str | None


class Residency(Protocol):
    """Declares what a link does for resident buckets: their master, moments and packed gradient are on its device.

    ``Link.pack`` packs them, and their block sums arrive, as for any bucket.
    """

    device: torch.device

    def attach(self, bucket: Bucket) -> None:
        """Allocates the bucket's packed gradient on the device."""

    def step(self, bucket: Bucket) -> None:
        """Steps the pieces that ``bucket.resident_work`` froze, published parameters included.

        The training thread calls this; all that it enqueues afterwards sees the new values.
        """

    def free_bytes(self) -> int:
        """Returns the bytes of device memory that nothing has used so far, forward and backward included."""


# ---- choosing -------------------------------------------------------------------------------------------------------


def check_placement(value: Any) -> Asked:
    """Returns None, "auto" or the fraction that ``placement`` asks for; raises ArgumentError for anything else."""
    if value is None or value == AUTO:
        return value  # type: ignore[no-any-return]
    if isinstance(value, Mapping) and set(value) == {"gpu_fraction"}:
        fraction = as_float(value["gpu_fraction"])
        if 0.0 <= fraction <= 1.0:
            return fraction
    raise ArgumentError(
        f"placement={value!r}: expected None, 'auto' or {{'gpu_fraction': f}} with a number f from 0 to 1, the part of "
        "the parameters that keeps its state on the accelerator"
    )


def placer_for(asked: Asked, link: Link, params: Sequence[Tensor]) -> Placer | None:
    """Makes the placer, if one is asked for; raises without an accelerator or without kernels to step there."""
    if asked is None:
        return None
    residency: Residency | None = getattr(link, "residency", None)
    if residency is not None:
        return Placer(asked, residency)
    if all(param.device.type == "cpu" for param in params):
        raise ArgumentError(
            f"placement={_shown(asked)}: there is no accelerator, the parameters are on the CPU; pass None, or move "
            "the model to the accelerator before making the optimizer"
        )
    raise KernelsUnavailable(
        f"placement={_shown(asked)}: state on the accelerator is stepped by kernels, which could not be compiled (see "
        "the warning before this); make NVRTC available, or pass placement=None"
    )


def _shown(asked: Asked) -> str:
    return repr(asked) if isinstance(asked, str) else repr({"gpu_fraction": asked})


def last_in_backward(sizes: Iterable[tuple[int, int]], fraction: float) -> set[int]:
    """Chooses keys of (key, elements), given from the end of backward, with at most ``fraction`` of all elements.

    It chooses whole parameters. One that does not fit is left out, and smaller ones after it in the list may still fit.
    """
    listed = list(sizes)
    left = math.floor(fraction * sum(numel for _, numel in listed))
    chosen = set()
    for key, numel in listed:
        if 0 < numel <= left:
            chosen.add(key)
            left -= numel
    return chosen


class Placer:
    """Chooses the resident shards: first by registration, then by the observed order, with "auto" by measurements."""

    def __init__(self, asked: float | str, residency: Residency) -> None:
        self.residency = residency
        self.fraction = 0.0 if isinstance(asked, str) else asked
        self.why = "measuring" if isinstance(asked, str) else "as asked for"
        self._steps_to_measure = STEPS_MEASURED if isinstance(asked, str) else 0

    def choose_first(self, sizes: Sequence[tuple[int, int]]) -> set[int]:
        """Chooses keys of (key, elements) in registration order, whose reverse backward most likely follows."""
        return last_in_backward(sizes, self.fraction)

    def choose(self, shards: Sequence[Shard]) -> set[int]:
        """Chooses indices of shards, which are given in the order of backward."""
        return last_in_backward([(shard.index, shard.numel) for shard in reversed(shards)], self.fraction)

    def had_no_room_for(self, name: str) -> None:
        """Adds to ``why`` that the accelerator's memory was too full for the state of ``name``."""
        self.why += f"; the accelerator had no room left for {name} and what would have followed"

    def is_due(self) -> bool:
        """Counts a step; returns whether this one is the last before ``measure``."""
        if self._steps_to_measure == 0:
            return False
        self._steps_to_measure -= 1
        return self._steps_to_measure == 0

    def measure(self, measured: Measured) -> None:
        self.fraction, self.why = choose_fraction(measured)

    def wait_longer(self) -> None:
        """Postpones ``measure`` by a step, because nothing was measured so far."""
        self._steps_to_measure = 1


# ---- state ----------------------------------------------------------------------------------------------------------

State = tuple[Tensor, Tensor, Tensor]


def make_state(
    sizes: Sequence[int],
    master_dtypes: Sequence[torch.dtype],
    moments_dtype: torch.dtype,
    resident: Sequence[bool],
    placer: Placer | None,
) -> list[State]:
    """Makes master, exp_avg and exp_avg_sq of each size, all zero, in one slab per kind, dtype and place.

    ``moments_dtype``: uint8 for 8-bit moments, which are longer by their scales (superoffload/engine/moments.py).
    ``master_dtypes``: one per size, float32, or int16 for the remainders of a split master.
    """
    states: dict[int, State] = {}
    for on_device, master_dtype in sorted(set(zip(resident, master_dtypes, strict=True)), key=str):
        members = [i for i in range(len(sizes)) if (resident[i], master_dtypes[i]) == (on_device, master_dtype)]
        device = placer.residency.device if on_device and placer is not None else None
        lengths = [stored_numel(sizes[i], moments_dtype) for i in members]
        masters = slab_of_zeros([sizes[i] for i in members], master_dtype, device)
        exp_avgs, exp_avg_sqs = (slab_of_zeros(lengths, moments_dtype, device) for _ in range(2))
        states.update(zip(members, zip(masters, exp_avgs, exp_avg_sqs, strict=True), strict=True))
    return [states[i] for i in range(len(sizes))]


def slab_of_zeros(sizes: Sequence[int], dtype: torch.dtype, device: torch.device | None) -> list[Tensor]:
    """Makes one slab of zeros on ``device`` (None: in host memory); returns a slice of it for each size."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + aligned(size))
    slab = _zeros(starts[-1], dtype, device)
    return [slab[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def _zeros(numel: int, dtype: torch.dtype, device: torch.device | None) -> Tensor:
    what = f"master, exp_avg or exp_avg_sq of all {numel} parameters that begin to train"
    return host_zeros(numel, dtype, what) if device is None else torch.zeros(numel, dtype=dtype, device=device)


def take_state(shard: Shard, before: Shard, device: torch.device | None) -> None:
    """Gives ``shard`` the state of ``before``, another record of the same elements, on ``device`` or in host memory."""
    shard.take_over(before)
    if before.resident or device is not None:
        move_state(shard, device)


def move_state(shard: Shard, device: torch.device | None) -> None:
    """Moves the shard's state to ``device``, or to host memory (None); the old tensors stay unchanged."""
    old: State = (shard.master, shard.exp_avg, shard.exp_avg_sq)
    new = [  # all three before the shard changes, since memory may be refused
        host_empty(one.numel(), one.dtype)
        if device is None
        else torch.empty(one.numel(), dtype=one.dtype, device=device)
        for one in old
    ]
    if shard.upper is not None:
        shard.upper.gather(device)
    master, exp_avg, exp_avg_sq = (there.copy_(one) for there, one in zip(new, old, strict=True))
    shard.use_state(master, exp_avg, exp_avg_sq, resident=device is not None)
