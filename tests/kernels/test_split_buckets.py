"""Split masters in spans and buckets: what is refused, in which order calls come, and where the old halves are kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from superoffload import _native
from superoffload.errors import ArgumentError
from tests.support import kernel_inputs as cases
from tests.support import numpy_kernels
from tests.support.guarded_arrays import GuardedSpan, assert_bits, assert_state, halves_of, kernel_hyper, scalars_of
from tests.support.kernel_inputs import State
from tests.support.reference import adam
from tests.support.reference.convert import join

HYPER = cases.HYPERS[2]
OTHER = cases.HYPERS[1]
Arrays = dict[str, Any]


def split_arrays(length: int = 20, seed: int = 700) -> Arrays:
    """What a span with split masters is made of."""
    old = cases.state("training", length, seed)
    shadow, master = halves_of(old.master)
    gradient = cases.gradient("training", "bf16", length, seed + 3)
    return {**old._asdict(), "master": master, "gradient": gradient, "shadow": shadow}


# ---- spans ----------------------------------------------------------------------------------------------------------


def test_a_span_refuses_other_types_and_overlaps_beside_split_masters() -> None:
    arrays = split_arrays()
    numpy_kernels.Span(**arrays)
    for name, dtype in (("shadow", np.float32), ("shadow", np.int16), ("master", np.uint16), ("exp_avg", np.int16)):
        with pytest.raises(ArgumentError, match=name):
            numpy_kernels.Span(**{**arrays, name: np.full(20, 7, dtype)})
    memory = np.arange(39, dtype=np.uint16)
    with pytest.raises(ArgumentError, match="overlap"):
        numpy_kernels.Span(**{**arrays, "master": memory[:20].view(np.int16), "gradient": memory[19:]})
    assert np.array_equal(memory, np.arange(39))


@pytest.mark.parametrize("call", ["step", "step_journaled", "publish", "undo", "replay"])
def test_settle_follows_a_publish_and_nothing_else_does(call: str) -> None:
    """The upper halves are those of the new masters, the remainders those of the old ones. A publish ends a journal,
    since the old upper halves take its place."""
    old, gradient = cases.state("training", 100, 710), cases.gradient("training", "bf16", 100, 713)
    guarded = GuardedSpan(old, gradient, "split")
    span, hyper = guarded.span, kernel_hyper(HYPER)

    def refuse(name: str, *arguments: numpy_kernels.Hyper) -> None:
        before = State(*(values.copy() for values in guarded.state))
        with pytest.raises(ArgumentError):
            getattr(span, name)(*arguments)
        assert_state(guarded.state, before)

    refuse("settle", hyper)
    assert span.step_journaled(kernel_hyper(OTHER), width=2)
    refuse("settle", hyper)
    stepped = adam.step(*old, gradient, "split", OTHER)
    span.publish(hyper)
    refuse(call, *(() if call == "undo" else (hyper,)))
    span.settle(hyper)
    refuse("undo")
    stepped = adam.step(*stepped[:3], gradient, "split", HYPER)
    assert_state(guarded.state, State(*stepped[:3]))
    assert_bits("shadow", guarded.shadow, stepped.shadow)
    guarded.check()


# ---- buckets --------------------------------------------------------------------------------------------------------


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
