"""Split masters in buckets: where the old halves are kept between a publish and its settle."""

from __future__ import annotations

from typing import Any

from superoffload import _native
from tests.support import kernel_inputs as cases
from tests.support.guarded_arrays import assert_bits, assert_state, halves_of, scalars_of
from tests.support.kernel_inputs import State
from tests.support.reference import adam
from tests.support.reference.convert import join

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
