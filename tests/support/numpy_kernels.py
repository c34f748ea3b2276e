"""Runs the Adam kernels on NumPy arrays, for tests and benchmarks. Needs no torch.

bfloat16 has no NumPy type: such arrays are ``uint16`` bit patterns. The arithmetic is defined in docs/kernel.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from superoffload import _native
from superoffload._native import BLOCK
from tests.support.reference.adam import Hyper as Hyper

_TYPES = {
    np.dtype(np.float32): _native.ElementType.f32,
    np.dtype(np.float16): _native.ElementType.f16,
    np.dtype(np.uint16): _native.ElementType.bf16,
    np.dtype(np.uint8): _native.ElementType.q8,
}

Array = NDArray[np.float32] | NDArray[np.float16] | NDArray[np.uint16]
Moment = NDArray[np.float32] | NDArray[np.uint16] | NDArray[np.uint8]


class Span:
    """Steps a contiguous run of a bucket with its journal, on arrays that the caller owns.

    ``master``: float32 [n], or the int16 remainders of a split master, whose upper halves are the uint16 ``shadow``.
    Moments: float32 [n], or rounded stochastically: uint16 (bfloat16 bits) [n] or uint8 (codes, then the scale of each
    256 of them). ``gradient`` and ``shadow``: float32, float16 or uint16 [n]. ``arena_bytes`` is the room for escapes;
    by default every element may escape. ``placed``: what ``_native.Run`` takes of ``noise_stream``, ``first_index``,
    ``start`` and ``axes`` ((length, stride), the innermost first), which key the rounding, and ``past_cache``.
    """

    def __init__(
        self, master: NDArray[np.float32] | NDArray[np.int16], exp_avg: Moment, exp_avg_sq: Moment, gradient: Array,
        shadow: Array, *, arena_bytes: int | None = None, **placed: Any,
    ) -> None:  # fmt: skip
        self._arrays = master, exp_avg, exp_avg_sq, gradient, shadow  # keeps the memory alive
        self._arena_bytes = 20 * len(master) + 64 if arena_bytes is None else arena_bytes
        scales_at = len(master) if exp_avg.dtype == np.uint8 else None
        self._split = master.dtype == np.int16
        run = _native.Run(
            master=master.ctypes.data,
            exp_avg=exp_avg.ctypes.data,
            exp_avg_sq=exp_avg_sq.ctypes.data,
            gradient=gradient.ctypes.data,
            shadow=shadow.ctypes.data,
            numel=len(master),
            gradient_type=_TYPES[gradient.dtype],
            shadow_type=_TYPES[shadow.dtype],
            state_type=_TYPES[exp_avg.dtype],
            split_master=self._split,
            exp_avg_scales=0 if scales_at is None else exp_avg.ctypes.data + scales_at,
            exp_avg_sq_scales=0 if scales_at is None else exp_avg_sq.ctypes.data + scales_at,
            **placed,
        )
        padded = -(-len(master) // 64) * 64
        self._works = {width: _native.BucketWork([run], width * padded + self._arena_bytes) for width in (1, 2)}
        self._width = 0
        self._publishing = 2 if self._split else 1  # whose journal has room for the old upper halves

    def _run(self, operation: _native.Operation, hyper: Hyper | None, width: int | None = None) -> bool:
        """``width``: None stands for that of the journaled step."""
        assert width or self._width, "no journaled step"
        work = self._works[width or self._width]
        if hyper is not None:
            frozen = dict(vars(hyper))
            work.freeze(steps=[frozen.pop("step")], **frozen)
        return bool(work.run_all(operation, width or self._width))

    def step(self, hyper: Hyper) -> None:
        """Steps master, moments and shadow. The journal of the step before can no longer be undone."""
        self._run(_native.Operation.step, hyper, 1)
        self._width = 0

    def step_journaled(self, hyper: Hyper, width: int = 1) -> bool:
        """Steps with a journal of ``width`` bytes per code. False: the escapes do not fit, and nothing changed."""
        self._width = width if self._run(_native.Operation.step_journaled, hyper, width) else 0
        return self._width != 0

    def undo(self) -> None:
        """Restores master and moments to their bits before the last journaled step. The shadow stays as it is, unless
        the master is split.
        """
        self._run(_native.Operation.undo, None)
        self._width = 0

    def replay(self, hyper: Hyper) -> None:
        """Undoes the last journaled step and steps with ``hyper`` in one pass over memory."""
        self._run(_native.Operation.replay, hyper)
        self._width = 0

    def publish(self, hyper: Hyper) -> None:
        """Writes only the shadow of a step, with the bits that the full pass will give. Behind it a split master can be
        read, and takes another call, only after ``settle()``.
        """
        self._run(_native.Operation.publish, hyper, self._publishing)
        if self._split:
            self._width = 0

    def settle(self, hyper: Hyper) -> None:
        """Steps master and moments as ``publish()`` with the same ``hyper`` has written the shadow."""
        self._run(_native.Operation.settle, hyper, self._publishing)

    @property
    def journal_bytes(self) -> int:
        """Counts the bytes that the last journaled step used: codes, escapes and block table."""
        return int(self._works[self._width].journal_use().bytes)

    @property
    def escapes(self) -> tuple[int, int, int]:
        """Counts the words of exp_avg, exp_avg_sq and master that the last journaled step kept whole."""
        first, second, master = self._works[self._width].journal_use().escapes
        return int(first), int(second), int(master)


def sum_of_squares(gradient: Array, out: Array | None = None) -> NDArray[np.float64]:
    """Sums the squares of each block of 1024 elements in float64; +inf for a block with a non-finite element. The same
    pass copies the gradient to ``out``."""
    sums = np.empty(-(-len(gradient) // BLOCK), np.float64)
    target = 0 if out is None else out.ctypes.data
    _native.pack(gradient.ctypes.data, target, _TYPES[gradient.dtype], len(gradient), sums.ctypes.data)
    return sums


def fold_sums(blocks: NDArray[np.float64]) -> float:
    """Adds up one shard's block sums, in an order that depends only on their number."""
    return float(_native.fold_sums([(blocks.ctypes.data, len(blocks))])[0])
