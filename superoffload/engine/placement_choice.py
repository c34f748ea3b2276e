"""``placement="auto"`` chooses its fraction by these numbers. The planner imports this without loading torch."""

from __future__ import annotations

from dataclasses import dataclass

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
