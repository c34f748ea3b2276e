"""Runs the Adam kernels on NumPy arrays, for tests and benchmarks. Needs no torch.

bfloat16 has no NumPy type: such arrays are ``uint16`` bit patterns. The arithmetic is defined in docs/kernel.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from superoffload import _native
from superoffload.errors import ArgumentError
from superoffload.kernels import BLOCK, MOMENT_BLOCK
from tests.support.reference.adam import Hyper as Hyper

_TYPES = {
    np.dtype(np.float32): _native.ElementType.f32,
    np.dtype(np.float16): _native.ElementType.f16,
    np.dtype(np.uint16): _native.ElementType.bf16,
}

Array = NDArray[np.float32] | NDArray[np.float16] | NDArray[np.uint16]
Moment = NDArray[np.float32] | NDArray[np.uint16] | NDArray[np.uint8]
_MOMENT_TYPES = {
    np.dtype(np.float32): _native.ElementType.f32,
    np.dtype(np.uint16): _native.ElementType.bf16,
    np.dtype(np.uint8): _native.ElementType.q8,
}


_AnyArray = Array | Moment | NDArray[np.int16]


class Span:
    """Steps a contiguous run of a bucket with its journal, on arrays that the caller owns.

    ``master``: float32 [n]; ``exp_avg`` and ``exp_avg_sq``: float32 [n], or rounded stochastically: uint16 (bfloat16
    bits) [n] or uint8 (codes, then the scale of each MOMENT_BLOCK of them) [n + ceil(n / 256)]; ``gradient`` and
    ``shadow``: float32, float16 or uint16 (bfloat16 bits) [n]. An int16 ``master`` has the remainders of a split
    master, whose upper halves are the uint16 ``shadow`` (docs/kernel.md). ``arena_bytes`` is the room for escapes; by
    default every element may escape. ``noise_stream`` (seed and parameter) and the places of elements in the whole
    parameter key the stochastic rounding: element 0 is that of ``first_index`` in a shard that begins at ``start`` and
    lies along ``axes`` ((length, stride), the innermost first; (): it is one run). ``past_cache``: the shadow, and with
    AVX-512 a journal's codes, may be stored past the processor's caches, which is faster for runs that exceed them and
    changes no bit.
    """

    def __init__(
        self,
        master: NDArray[np.float32] | NDArray[np.int16],
        exp_avg: Moment,
        exp_avg_sq: Moment,
        gradient: Array,
        shadow: Array,
        *,
        arena_bytes: int | None = None,
        noise_stream: int = 0,
        first_index: int = 0,
        start: int = 0,
        axes: Sequence[tuple[int, int]] = (),
        past_cache: bool = False,
    ) -> None:
        arrays: dict[str, _AnyArray] = {
            "master": master,
            "exp_avg": exp_avg,
            "exp_avg_sq": exp_avg_sq,
            "gradient": gradient,
            "shadow": shadow,
        }
        for name, array in arrays.items():
            others: tuple[type, ...] = {"master": (np.int16,), "exp_avg": (np.uint8,), "exp_avg_sq": (np.uint8,)}.get(
                name, ()
            )
            _check_vector(name, array, writeable=name != "gradient", others=others)
            blocks = -(-len(master) // MOMENT_BLOCK) if array.dtype == np.uint8 else 0
            if len(array) != len(master) + blocks:
                scales = f" and the scales of their {blocks} blocks" if blocks else ""
                raise ArgumentError(f"{name}: {len(array)} elements, expected {len(master)} like master{scales}")
        split = master.dtype == np.int16
        if not split and master.dtype != np.float32:
            raise ArgumentError(f"master: dtype {master.dtype}, expected float32, or int16 of a split master")
        if split and shadow.dtype != np.uint16:
            raise ArgumentError(f"shadow: dtype {shadow.dtype}, expected uint16 (bfloat16 bits) with a split master")
        if exp_avg.dtype not in _MOMENT_TYPES or exp_avg.dtype != exp_avg_sq.dtype:
            raise ArgumentError(
                f"exp_avg, exp_avg_sq: dtypes {exp_avg.dtype}, {exp_avg_sq.dtype}; expected both float32, both uint16 "
                "(bfloat16 bits) or both uint8 (codes and scales)"
            )
        scales_at = len(master) if exp_avg.dtype == np.uint8 else None
        _check_disjoint(arrays)
        self._arrays = arrays  # keeps the memory alive
        self._arena_bytes = 20 * len(master) + 64 if arena_bytes is None else arena_bytes
        runs = [
            _native.Run(
                master=master.ctypes.data,
                exp_avg=exp_avg.ctypes.data,
                exp_avg_sq=exp_avg_sq.ctypes.data,
                gradient=gradient.ctypes.data,
                shadow=shadow.ctypes.data,
                numel=len(master),
                gradient_type=_TYPES[gradient.dtype],
                shadow_type=_TYPES[shadow.dtype],
                state_type=_MOMENT_TYPES[exp_avg.dtype],
                first_index=first_index,
                start=start,
                axes=axes,
                noise_stream=noise_stream,
                past_cache=past_cache,
                split_master=split,
                exp_avg_scales=0 if scales_at is None else exp_avg.ctypes.data + scales_at,
                exp_avg_sq_scales=0 if scales_at is None else exp_avg_sq.ctypes.data + scales_at,
            )
        ]
        padded = -(-len(master) // 64) * 64
        self._works = {width: _native.BucketWork(runs, width * padded + self._arena_bytes) for width in (1, 2)}
        self._width = 0
        self._split = split
        self._publishing = 2 if split else 1  # whose journal has room for the old upper halves
        self._unsettled = False

    def _run(self, operation: _native.Operation, hyper: Hyper | None, width: int) -> bool:
        if self._split and self._unsettled != (operation == _native.Operation.settle):
            raise ArgumentError("a split master: expected settle() right after each publish(), and nowhere else")
        work = self._works[width]
        if hyper is not None:
            if hyper.step < 1:
                raise ArgumentError(f"step={hyper.step}: expected at least 1, the number of the first step")
            work.freeze(
                lr=hyper.lr,
                beta1=hyper.beta1,
                beta2=hyper.beta2,
                eps=hyper.eps,
                weight_decay=hyper.weight_decay,
                gradient_factor=hyper.gradient_factor,
                l2=hyper.l2,
                steps=[hyper.step],
            )
        return bool(work.run_all(operation, width))

    def step(self, hyper: Hyper) -> None:
        """Steps master, moments and shadow. The journal of the step before can no longer be undone."""
        self._run(_native.Operation.step, hyper, 1)
        self._width = 0

    def step_journaled(self, hyper: Hyper, width: int = 1) -> bool:
        """Steps with a journal of ``width`` bytes per code. False: the escapes do not fit, and nothing changed."""
        if width not in (1, 2):
            raise ArgumentError(f"width: {width}, expected 1 or 2 bytes per code")
        self._width = 0
        if self._run(_native.Operation.step_journaled, hyper, width):
            self._width = width
        return self._width != 0

    def undo(self) -> None:
        """Restores master and moments to their bits before the last journaled step. The shadow stays as it is, unless
        the master is split.
        """
        self._run(_native.Operation.undo, None, self._journaled_width())
        self._width = 0

    def replay(self, hyper: Hyper) -> None:
        """Undoes the last journaled step and steps with ``hyper`` in one pass over memory."""
        self._run(_native.Operation.replay, hyper, self._journaled_width())
        self._width = 0

    def publish(self, hyper: Hyper) -> None:
        """Writes only the shadow of a step, with the bits that the full pass will give. Behind it a split master can be
        read, and takes another call, only after ``settle()``.
        """
        self._run(_native.Operation.publish, hyper, self._publishing)
        if self._split:
            self._width = 0
            self._unsettled = True

    def settle(self, hyper: Hyper) -> None:
        """Steps master and moments as ``publish()`` with the same ``hyper`` has written the shadow."""
        self._run(_native.Operation.settle, hyper, self._publishing)
        self._unsettled = False

    @property
    def journal_bytes(self) -> int:
        """Counts the bytes that the last journaled step used: codes, escapes and block table."""
        return int(self._works[self._journaled_width()].journal_use().bytes)

    @property
    def escapes(self) -> tuple[int, int, int]:
        """Counts the words of exp_avg, exp_avg_sq and master that the last journaled step kept whole."""
        first, second, master = self._works[self._journaled_width()].journal_use().escapes
        return int(first), int(second), int(master)

    def _journaled_width(self) -> int:
        if self._width == 0:
            raise ArgumentError("undo(), replay() and the journal's figures: call step_journaled() before them")
        return self._width


def sum_of_squares(gradient: Array) -> NDArray[np.float64]:
    """Sums the squares of each block of 1024 elements in float64; +inf for a block with a non-finite element."""
    _check_vector("gradient", gradient, writeable=False)
    sums = np.empty(-(-len(gradient) // BLOCK), np.float64)
    _native.pack(gradient.ctypes.data, 0, _TYPES[gradient.dtype], len(gradient), sums.ctypes.data)
    return sums


def pack(gradient: Array, out: Array) -> NDArray[np.float64]:
    """Copies ``gradient`` to ``out`` and returns its sums of squares, in one pass."""
    _check_vector("gradient", gradient, writeable=False)
    _check_vector("out", out, writeable=True)
    if out.dtype != gradient.dtype or len(out) != len(gradient):
        raise ArgumentError(
            f"out: {len(out)} elements of {out.dtype}, expected {len(gradient)} of {gradient.dtype} like the gradient"
        )
    sums = np.empty(-(-len(gradient) // BLOCK), np.float64)
    _native.pack(gradient.ctypes.data, out.ctypes.data, _TYPES[gradient.dtype], len(gradient), sums.ctypes.data)
    return sums


def fold_sums(blocks: NDArray[np.float64]) -> float:
    """Adds up one shard's block sums, in an order that depends only on their number."""
    good = isinstance(blocks, np.ndarray) and blocks.dtype == np.float64 and blocks.ndim == 1
    if not good or not blocks.flags.c_contiguous or not blocks.flags.aligned:
        raise ArgumentError(f"blocks: {_describe(blocks)}, expected a contiguous float64 vector")
    return float(_native.fold_sums([(blocks.ctypes.data, len(blocks))])[0])


def _describe(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"dtype {value.dtype}, shape {value.shape}, strides {value.strides}, at address {value.ctypes.data:#x}"
    return type(value).__name__


def _check_vector(name: str, array: _AnyArray, *, writeable: bool, others: tuple[type, ...] = ()) -> None:
    if not isinstance(array, np.ndarray) or not (array.dtype in _TYPES or array.dtype in others):
        raise ArgumentError(f"{name}: {_describe(array)}; expected a float32, float16 or uint16 (bfloat16 bits) array")
    if array.ndim != 1 or not array.flags.c_contiguous or not array.flags.aligned:
        raise ArgumentError(f"{name}: {_describe(array)}; expected a contiguous, aligned vector")
    if writeable and not array.flags.writeable:
        raise ArgumentError(f"{name}: a read-only array; expected a writeable one")


def _check_disjoint(arrays: dict[str, _AnyArray]) -> None:
    ends = sorted((array.ctypes.data, array.ctypes.data + array.nbytes, name) for name, array in arrays.items())
    for (_, end, name), (start, _, other) in pairwise(ends):
        if start < end:
            raise ArgumentError(f"{name} and {other} overlap in memory; expected separate arrays")
