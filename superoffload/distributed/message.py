"""Packs what a rank tells the others in every step: sums for the verdict and values for the light check.

It fits the first message of an exchange (128 bytes), which also says which step it is about.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from superoffload.distributed.group import ROOM

MOST_CLASSES = 8

_FORMAT = struct.Struct(f"<HHIIIIIIId{MOST_CLASSES}d")
assert _FORMAT.size <= ROOM

FAILED = 1  # this rank raises instead of stepping
FOUND_INF = 2  # this rank's loss scaler saw a NaN or an infinity
LEFT = 4  # this rank has no more inputs, in DistributedDataParallel.join()

NO_INPUTS = (
    "DistributedDataParallel.join(): {who} has no more inputs and takes no step, and every step needs all ranks. "
    "Make the optimizer with replicated='local', so that each rank steps by itself with DDP's gradients; then join() "
    "works as with torch.optim"
)


@dataclass(frozen=True)
class Packet:
    """Carries one rank's part of a step. ``sums``: one sum of squares per set of replicas, at most MOST_CLASSES.

    Of this step: ``settings`` and ``gradients`` are checksums of the hyper-parameters and of the parameters that have
    gradients. Of the step before: ``applied`` and ``skipped`` count steps, ``factor`` is the gradient factor, ``unit``
    the probed unit, ``bad`` 1 + the index of a shard whose published copy is not round(master), ``copy`` the checksum
    of the published copy.
    """

    sums: tuple[float, ...]
    flags: int = 0
    settings: int = 0
    gradients: int = 0
    applied: int = 0
    skipped: int = 0
    unit: int = 0
    bad: int = 0
    copy: int = 0
    factor: float = 0.0

    def to_bytes(self) -> bytes:
        sums = self.sums + (0.0,) * (MOST_CLASSES - len(self.sums))
        return _FORMAT.pack(
            self.flags, len(self.sums), self.settings, self.gradients, self.applied, self.skipped,
            self.unit, self.bad, self.copy, self.factor, *sums,
        )  # fmt: skip

    @staticmethod
    def from_bytes(data: bytes) -> Packet:
        flags, count, settings, gradients, applied, skipped, unit, bad, copy, factor, *sums = _FORMAT.unpack_from(data)
        return Packet(tuple(sums[:count]), flags, settings, gradients, applied, skipped, unit, bad, copy, factor)
