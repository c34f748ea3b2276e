"""Split masters in spans and buckets: what is refused, in which order calls come, and where the old halves are kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from superoffload import _native, kernels
from superoffload.errors import ArgumentError
from tests.support import kernel_inputs as cases
from tests.support.guarded_arrays import GuardedSpan, assert_bits, assert_state, halves_of, kernel_hyper, scalars_of
from tests.support.kernel_inputs import State
from tests.support.reference import adam
from tests.support.reference.adam import Stepped
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


# ---- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name,dtype",
    [
        ("shadow", np.float32),
        ("shadow", np.float16),
        ("shadow", np.int16),
        ("master", np.uint16),
        ("master", np.float16),
        ("exp_avg", np.int16),
        ("exp_avg_sq", np.int16),
        ("gradient", np.int16),
    ],
)
def test_a_span_refuses_other_types_beside_split_masters(name: str, dtype: type) -> None:
    arrays = split_arrays()
    kernels.Span(**arrays)
    arrays[name] = np.full(20, 7, dtype)
    before = {name: array.tobytes() for name, array in arrays.items()}
    with pytest.raises(ArgumentError, match=name):
        kernels.Span(**arrays)
    assert {name: array.tobytes() for name, array in arrays.items()} == before


@pytest.mark.parametrize("other", ["shadow", "gradient"])
def test_a_span_refuses_remainders_that_overlap_other_arrays(other: str) -> None:
    arrays = split_arrays()
    memory = np.arange(39, dtype=np.uint16)
    arrays["master"], arrays[other] = memory[:20].view(np.int16), memory[19:]
    with pytest.raises(ArgumentError, match="overlap"):
        kernels.Span(**arrays)
    assert np.array_equal(memory, np.arange(39))


def test_a_span_of_whole_masters_takes_no_remainders_elsewhere() -> None:
    arrays = split_arrays()
    arrays["master"] = np.zeros(20, np.float32)
    arrays["shadow"] = np.zeros(20, np.int16)
    with pytest.raises(ArgumentError, match="shadow"):
        kernels.Span(**arrays)


def test_only_a_bf16_shadow_has_upper_halves() -> None:
    arrays = split_arrays()
    for shadow_type in (_native.ElementType.f32, _native.ElementType.f16):
        with pytest.raises(ValueError, match="split master"):
            run_of(arrays, shadow_type=shadow_type)


# ---- the order of calls ---------------------------------------------------------------------------------------------


def small_span() -> tuple[State, npt.NDArray[Any], GuardedSpan]:
    old = cases.state("training", 100, 710)
    gradient = cases.gradient("training", "bf16", 100, 713)
    return old, gradient, GuardedSpan(old, gradient, "split")


def expect(guarded: GuardedSpan, expected: Stepped) -> None:
    assert_state(guarded.state, State(*expected[:3]))
    assert_bits("shadow", guarded.shadow, expected.shadow)
    guarded.check()


def test_settle_needs_a_publish() -> None:
    old, _, guarded = small_span()
    for prepare in (lambda: None, lambda: guarded.span.step_journaled(kernel_hyper(HYPER))):
        prepare()
        before = State(*(values.copy() for values in guarded.state))
        with pytest.raises(ArgumentError, match="publish"):
            guarded.span.settle(kernel_hyper(HYPER))
        assert_state(guarded.state, before)
    guarded.span.undo()
    assert_state(guarded.state, old)


@pytest.mark.parametrize("call", ["step", "step_journaled", "publish", "undo", "replay"])
def test_nothing_but_settle_follows_a_publish(call: str) -> None:
    """The upper halves are those of the new masters, the remainders those of the old ones."""
    old, gradient, guarded = small_span()
    hyper = kernel_hyper(HYPER)
    assert guarded.span.step_journaled(kernel_hyper(OTHER))
    guarded.span.undo()
    guarded.span.publish(hyper)
    before = State(*(values.copy() for values in guarded.state))
    arguments = () if call == "undo" else (hyper,)
    with pytest.raises(ArgumentError):
        getattr(guarded.span, call)(*arguments)
    assert_state(guarded.state, before)
    guarded.span.settle(hyper)
    expect(guarded, adam.step(*old, gradient, "split", HYPER))


def test_a_publish_ends_a_journal_of_split_masters() -> None:
    """Their old upper halves take its place."""
    old, gradient, guarded = small_span()
    assert guarded.span.step_journaled(kernel_hyper(HYPER), width=2)
    stepped = adam.step(*old, gradient, "split", HYPER)
    guarded.span.publish(kernel_hyper(OTHER))
    guarded.span.settle(kernel_hyper(OTHER))
    with pytest.raises(ArgumentError, match="step_journaled"):
        guarded.span.undo()
    expect(guarded, adam.step(*stepped[:3], gradient, "split", OTHER))


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


@pytest.mark.parametrize("journal_bytes,publishes", [(0, False), (2 * 128 - 1, False), (2 * 128, True)])
def test_a_bucket_publishes_if_its_journal_holds_the_old_halves(journal_bytes: int, publishes: bool) -> None:
    """65 elements take the place of 128, a multiple of 64."""
    arrays = split_arrays(65)
    work = _native.BucketWork([run_of(arrays)], journal_bytes)
    assert work.publishes is publishes
    freeze(work, [HYPER.step])
    before = bits_of(arrays)
    if publishes:
        work.run_all(_native.Operation.publish)
        work.run_all(_native.Operation.settle)
    else:
        with pytest.raises(ValueError, match="65 split masters, 2 bytes each; step the bucket in one pass"):
            work.run_all(_native.Operation.publish)
        assert bits_of(arrays) == before
        work.run_all(_native.Operation.step)
    old = cases.state("training", 65, 700)
    stepped = adam.step(*old, arrays["gradient"], "split", HYPER)
    assert_bits("master", join(arrays["shadow"], arrays["master"]), stepped.master)
    assert_bits("shadow", arrays["shadow"], stepped.shadow)


def test_a_bucket_of_whole_masters_publishes_without_a_journal() -> None:
    arrays = {**split_arrays(65), "master": np.zeros(65, np.float32)}
    assert _native.BucketWork([run_of(arrays, split_master=False)], 0).publishes


def test_a_bucket_settles_only_what_its_journals_memory_still_has() -> None:
    arrays = split_arrays(65)
    work = _native.BucketWork([run_of(arrays)], 100 * 128)
    freeze(work, [HYPER.step])
    before = bits_of(arrays)
    with pytest.raises(RuntimeError, match="publish"):
        work.run_all(_native.Operation.settle)
    assert bits_of(arrays) == before
    work.run_all(_native.Operation.publish)
    work.run_all(_native.Operation.settle)
    assert work.run_all(_native.Operation.step_journaled)
    stepped = bits_of(arrays)
    with pytest.raises(RuntimeError, match="publish"):
        work.run_all(_native.Operation.settle)
    assert bits_of(arrays) == stepped


def by_caller(work: _native.BucketWork) -> None:
    work.run_all(_native.Operation.publish)
    work.run_all(_native.Operation.settle)


def by_worker_threads(work: _native.BucketWork) -> None:
    pool = _native.WorkerPool([-1, -1])
    try:
        for operation in (_native.Operation.publish, _native.Operation.settle):
            done = pool.submit(work, operation)
            assert done.wait(60) and not done.error
    finally:
        pool.close()


@pytest.mark.parametrize("two_phases", [by_caller, by_worker_threads])
def test_every_run_of_a_bucket_keeps_halves_of_its_own(two_phases: Callable[[_native.BucketWork], None]) -> None:
    """Several chunks, whole masters between split ones, and a run without a gradient."""
    lengths, absent, whole = (70, 70000, 1000, 33, 200), 2, 3
    states = [cases.state("training", length, 720 + 10 * number) for number, length in enumerate(lengths)]
    pieces = [split_arrays(length, 720 + 10 * number) for number, length in enumerate(lengths)]
    pieces[whole]["master"] = states[whole].master.copy()
    before = [bits_of(piece) for piece in pieces]
    runs = [run_of(piece, split_master=number != whole) for number, piece in enumerate(pieces)]
    work = _native.BucketWork(runs, 2 * sum(-(-length // 64) * 64 for length in lengths))
    freeze(work, [0 if number == absent else HYPER.step for number in range(len(lengths))])
    two_phases(work)
    for number, (piece, old) in enumerate(zip(pieces, states, strict=True)):
        if number == absent:
            assert bits_of(piece) == before[number]
            continue
        stepped = adam.step(*old, piece["gradient"], "bf16" if number == whole else "split", HYPER)
        master = piece["master"] if number == whole else join(piece["shadow"], piece["master"])
        assert_state(State(master, piece["exp_avg"], piece["exp_avg_sq"]), State(*stepped[:3]), f"run {number}")
        assert_bits("shadow", piece["shadow"], stepped.shadow, f"run {number}")
