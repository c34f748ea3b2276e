"""Undo is exact, replay is undo and step, the arena bounds the journal: on every instruction set, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from superoffload import kernels
from tests.support import kernel_battery as battery
from tests.support import kernel_inputs as cases
from tests.support.guarded_arrays import GuardedSpan, assert_state, each_isa
from tests.support.kernel_inputs import State
from tests.support.reference import adam
from tests.support.reference.adam import Hyper
from tests.support.reference.convert import narrow

ISAS = kernels.available_isas()

each_width = pytest.mark.parametrize("width", [1, 2])


@each_isa
@each_width
def test_a_chain_of_speculated_steps_as_in_training(isa: str, width: int) -> None:
    """Committed, undone and replayed steps in turn, from the first step on; the state never leaves the reference."""
    length = 2500
    zeros = np.zeros(length, np.float32)
    state = State(cases.ranged(length, 410, -8, -3), zeros, zeros)
    gradient = np.zeros(length, np.uint16)
    guarded = GuardedSpan(state, gradient, "bf16", start=1)
    span = guarded.span
    bytes_used = []
    with kernels.using_isa(isa):
        for step in range(1, 34):
            gradient = noisy_gradient(length, step)
            guarded.set_gradient(gradient)
            hyper = Hyper(1e-3, 0.9, 0.999, 1e-8, 0.01, step)
            speculated = adam.step(*state, gradient, "bf16", hyper)
            assert span.step_journaled(hyper, width=width)
            guarded.expect(speculated, f"step {step}")
            bytes_used.append(span.journal_bytes / length)
            if step % 3 == 0:
                span.undo()
                assert_state(guarded.state, state, f"undo of step {step}")
                span.step(hyper)
            if step % 3 == 1:
                hyper = replace(hyper, gradient_factor=0.5)
                span.replay(hyper)
            after = adam.step(*state, gradient, "bf16", hyper)
            guarded.expect(after, f"end of step {step}")
            state = State(*after[:3])
    assert bytes_used[0] < width + 0.05
    assert max(bytes_used[20:]) < width + 0.25


def noisy_gradient(length: int, step: int) -> npt.NDArray[np.uint16]:
    """A constant direction with larger noise of its own in every step, as minibatches give it."""
    direction = cases.ranged(length, 411, -12, -9)
    noise = cases.ranged(length, 412 + step, -11, -9)
    return np.asarray(narrow(direction + noise, "bf16"))


@each_isa
@each_width
@pytest.mark.parametrize(("kind", "published"), [("training", "split"), ("hostile", "bf16")])
def test_a_full_arena_is_reported_with_nothing_changed(isa: str, width: int, kind: str, published: str) -> None:
    """For any arena size: either there is room and undo is exact, or master and moments are as they were."""
    with kernels.using_isa(isa):
        for length in (1, 1500):
            old = cases.state(kind, length, 460)
            gradient = cases.gradient(kind, "bf16", length, 463)
            hyper = Hyper(0.5, 0.0, 0.9, 1e-8, 2.0, 7)
            stepped = adam.step(*old, gradient, published, hyper)
            outcomes = []
            for arena_bytes in range(0, 24 * length + 400, max(8, length // 5)):
                guarded = GuardedSpan(old, gradient, published, start=1, arena_bytes=arena_bytes)
                outcomes.append(guarded.span.step_journaled(hyper, width=width))
                context = f"length {length}, arena of {arena_bytes} bytes"
                if outcomes[-1]:
                    guarded.expect(stepped, context)
                    # Codes are padded to whole vectors of at most 64 lanes.
                    assert guarded.span.journal_bytes <= arena_bytes + width * (length + 63), context
                    guarded.span.undo()
                assert_state(guarded.state, old, context)
                guarded.check(context)
            assert not outcomes[0] and outcomes[-1] and outcomes == sorted(outcomes), "room must grow with the arena"


@each_isa
@each_width
def test_more_escapes_than_wait_for_their_place_at_once(isa: str, width: int) -> None:
    """Every word of seven blocks escapes: what waits goes to the arena in parts, and a part without room is undone."""
    length = 7 * 1024 + 100
    old = cases.state("training", length, 464)
    gradient = cases.gradient("training", "bf16", length, 465)
    hyper = Hyper(0.5, 0.0, 0.0, 1e-8, 2.0, 5)
    with kernels.using_isa(isa):
        for room, fits in ((1.0, True), (0.99, False), (0.5, False), (0.2, False)):
            guarded = GuardedSpan(old, gradient, "bf16", arena_bytes=int(room * 3 * 6 * length))
            assert guarded.span.step_journaled(hyper, width=width) == fits
            if fits:
                assert guarded.span.escapes == (length, length, length)
                guarded.span.undo()
            assert_state(guarded.state, old, f"room for {room} of the escapes")
            guarded.check(f"room for {room} of the escapes")


def test_a_journal_of_one_instruction_set_is_undone_by_any_other() -> None:
    case = battery.span_cases("bf16", "bf16", False)[2 * len(cases.LENGTHS) - 4]
    assert case.kind == "hostile" and case.length > 2048
    for writer in ISAS:
        for reader in ISAS:
            for width in (1, 2):
                guarded = GuardedSpan(case.old, case.gradient, "bf16", case.start)
                with kernels.using_isa(writer):
                    assert guarded.span.step_journaled(case.hyper, width=width)
                with kernels.using_isa(reader):
                    guarded.span.undo()
                assert_state(guarded.state, case.old, f"written by {writer}, undone by {reader}")
