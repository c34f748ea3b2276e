"""What ``placement="auto"`` chooses, from a few numbers; loads no torch, since the planner asks it too."""

from __future__ import annotations

from dataclasses import dataclass

STEPS_MEASURED = 3  # after the one that shows the order, before "auto" chooses
SHARE_OF_FREE_MEMORY = 0.5  # that "auto" takes at most: batches differ, and so does what they need


@dataclass(frozen=True)
class Measured:
    """What "auto" chooses by. Seconds per step: ``optimizer`` of one plain pass over all parameters on the host."""

    backward: float
    optimizer: float
    free_bytes: int
    numel: int
    bytes_per_param: float  # of state and packed gradient on the device
    buckets: int


def choose_fraction(measured: Measured) -> tuple[float, str]:
    """The fraction, and why.

    Enough that the processors are done with the others when backward is; at least a bucket, since nothing hides the
    step of the last one; at most what half of the free memory holds.
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
