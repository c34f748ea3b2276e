"""Split masters: two halves are a master's bits, also in buckets between a publish and its settle. (Every operation on
them: test_kernels.py, test_bf16_moments.py.)"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from superoffload import _native, kernels
from tests.support import kernel_inputs as cases
from tests.support.guarded_arrays import GuardedSpan, assert_bits, assert_state, each_isa, halves_of, scalars_of
from tests.support.kernel_inputs import State
from tests.support.reference import adam, convert
from tests.support.reference.adam import Float32Array, Hyper
from tests.support.reference.convert import join

# Upper halves where something ends: zero, denormals, one, the largest number, infinity, both kinds of NaN.
UPPER_EDGES = (0x0000, 0x0001, 0x007F, 0x0080, 0x3F7F, 0x3F80, 0x3F81, 0x7F7E, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF)
LOWER_EDGES = (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)  # 0x8000 is a tie
NAN = 0x7FC00000


def masters_with(uppers: npt.NDArray[np.uint32], lowers: npt.NDArray[np.uint32]) -> Float32Array:
    """Every pair of an upper and a lower half of a word."""
    words: Float32Array = ((uppers << np.uint32(16))[:, None] | lowers[None, :]).reshape(-1).view(np.float32)
    return words


# ---- the reference's own halves -------------------------------------------------------------------------------------


def expect_bijection(uppers: npt.NDArray[np.uint16], lowers: npt.NDArray[np.uint16]) -> None:
    """From words to halves and back, and from halves to words and back; what is NaN becomes the one NaN."""
    master = masters_with(uppers.astype(np.uint32), lowers.astype(np.uint32))
    halves = convert.split(master)
    is_nan = np.isnan(master)
    expected = np.where(is_nan, np.uint32(NAN), master.view(np.uint32))
    assert np.array_equal(convert.join(*halves).view(np.uint32), expected)
    assert set(halves.upper[is_nan].tolist()) <= {0x7FC0} and not halves.remainder[is_nan].any()
    upper, remainder = np.repeat(uppers, lowers.size), np.tile(lowers.view(np.int16), uppers.size)
    joined = convert.join(upper, remainder)
    again = convert.split(joined)
    same = (again.upper == upper) & (again.remainder == remainder)
    assert (same | np.isnan(joined)).all()


def test_halves_and_words_determine_each_other() -> None:
    """Every lower half at both ends of binades, then every upper half near its tie."""
    every = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    for exponent in (*range(0, 512, 17), 254, 255, 256, 510, 511):  # and the sign
        expect_bijection(np.array([exponent << 7, exponent << 7 | 0x7F], np.uint16), every)
    expect_bijection(every, np.array(LOWER_EDGES, np.uint16))


def magnitude_of(pattern: int) -> Fraction:
    """A bf16 number without its sign; infinity as the number that would follow the largest one."""
    exponent, significand = pattern >> 7 & 0xFF, pattern & 0x7F
    return Fraction(significand + 128 * (exponent > 0)) * Fraction(2) ** (max(exponent, 1) - 134)


def test_the_upper_half_is_the_nearest_number_ties_away_from_zero() -> None:
    edges = [upper | sign for upper in UPPER_EDGES for sign in (0, 0x8000)]
    at_edges = masters_with(np.array(edges, np.uint32), np.array(LOWER_EDGES, np.uint32))
    values = np.concatenate([cases.hostile_fp32(4000, 600), at_edges])
    values = values[np.isfinite(values)]
    ties = 0
    for value, upper in zip(values, convert.split(values).upper, strict=True):
        below = int(np.abs(value).view(np.uint32)) >> 16
        magnitude = abs(Fraction(float(value)))
        over, under = magnitude_of(below + 1) - magnitude, magnitude - magnitude_of(below)
        ties += over == under
        expected = below + (over <= under) | (0x8000 if np.signbit(value) else 0)
        assert int(upper) == expected, f"{float(value).hex()}: {int(upper):#06x}, expected {expected:#06x}"
    assert ties > 100


# ---- what the kernels store -----------------------------------------------------------------------------------------


@each_isa
def test_stored_halves_are_those_of_the_definition(isa: str) -> None:
    """lr = 0 and no decay store the masters themselves: every upper half near each tie."""
    hyper = Hyper(lr=0.0, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, step=2)
    every = np.arange(65536, dtype=np.uint32)
    zeros = np.zeros(65536, np.float32)
    with kernels.using_isa(isa):
        for lower in LOWER_EDGES:
            master = masters_with(every, np.array([lower], np.uint32))
            guarded = GuardedSpan(State(master, zeros, zeros), zeros, "split")
            guarded.span.step(hyper)
            halves = convert.split(master)
            whole = GuardedSpan(State(master, zeros, zeros), zeros, "bf16")
            whole.span.step(hyper)
            # To even, a tie goes to the even upper half: away from zero, to the other one.
            tie = (whole.state.master.view(np.uint32) & np.uint32(0x1FFFF)) == 0x8000
            assert np.array_equal(guarded.shadow != whole.shadow, tie), "parameters differ at ties only"
            assert_bits("upper halves", guarded.shadow, halves.upper, f"lower half {lower:#06x}")
            assert_bits("remainders", guarded.remainders, halves.remainder, f"lower half {lower:#06x}")


HYPER = cases.HYPERS[2]
Arrays = dict[str, Any]


def split_arrays(length: int = 20, seed: int = 700) -> Arrays:
    """What a span with split masters is made of."""
    old = cases.state("training", length, seed)
    shadow, master = halves_of(old.master)
    gradient = cases.gradient("training", "bf16", length, seed + 3)
    return {**old._asdict(), "master": master, "gradient": gradient, "shadow": shadow}


def run_of(arrays: Arrays, **changes: Any) -> _native.Run:
    """A run with bf16 gradients and shadow, fp32 moments."""
    arguments: dict[str, Any] = {name: array.ctypes.data for name, array in arrays.items()}
    bf16 = _native.ElementType.bf16
    arguments |= {"gradient_type": bf16, "shadow_type": bf16, "split_master": True}
    return _native.Run(**{**arguments, **changes}, numel=arrays["master"].size)


def freeze(work: _native.BucketWork, steps: list[int]) -> None:
    work.freeze(**scalars_of(HYPER), l2=False, steps=steps)


def bits_of(arrays: Arrays) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in arrays.items()}


def test_every_run_of_a_bucket_keeps_halves_of_its_own() -> None:
    """On worker threads: several chunks, whole masters between split ones, and a run without a gradient."""
    lengths, absent, whole = (70, 70000, 1000, 33, 200), 2, 3
    states = [cases.state("training", length, 720 + 10 * number) for number, length in enumerate(lengths)]
    pieces = [split_arrays(length, 720 + 10 * number) for number, length in enumerate(lengths)]
    pieces[whole]["master"] = states[whole].master.copy()
    before = [bits_of(piece) for piece in pieces]
    runs = [run_of(piece, split_master=number != whole) for number, piece in enumerate(pieces)]
    work = _native.BucketWork(runs, 2 * sum(-(-length // 64) * 64 for length in lengths))
    freeze(work, [0 if number == absent else HYPER.step for number in range(len(lengths))])
    pool = _native.WorkerPool([-1, -1])
    try:
        for operation in (_native.Operation.publish, _native.Operation.settle):
            done = pool.submit(work, operation)
            assert done.wait(60) and not done.error
    finally:
        pool.close()
    for number, (piece, old) in enumerate(zip(pieces, states, strict=True)):
        if number == absent:
            assert bits_of(piece) == before[number]
            continue
        stepped = adam.step(*old, piece["gradient"], "bf16" if number == whole else "split", HYPER)
        master = piece["master"] if number == whole else join(piece["shadow"], piece["master"])
        assert_state(State(master, piece["exp_avg"], piece["exp_avg_sq"]), State(*stepped[:3]), f"run {number}")
        assert_bits("shadow", piece["shadow"], stepped.shadow, f"run {number}")
