"""Any schedule of gradients, retractions, hyper-parameter changes, clips and skips gives the reference's bits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from superoffload.engine.bucket import GroupHyper, Shard
from superoffload.engine.bucket_state import BucketState
from superoffload.engine.speculation_schedule import MODES
from tests.support.engine_rig import COUNTERS, Rig, Settings, assert_same_bits, rig, to_numpy, to_tensor
from tests.support.reference.convert import narrow

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HYPER = GroupHyper(1e-2, 0.9, 0.99, 1e-8, 0.1)
LOOSE = st.sampled_from([None, None, 1e4, 1e200, 30.0])
CLIPS = st.sampled_from([None, None, 1e-3, 0.5, 10.0, 30.0, 1e4])
UNSCALES = st.sampled_from([1.0, 1.0, 1.0, 1.0, 0.5, -0.25, 2.0**-16, 0.0, -0.0])

HYPERS = st.builds(
    GroupHyper,
    lr=st.sampled_from([0.0, 1e-4, 1e-2, 0.3]),
    beta1=st.sampled_from([0.0, 0.5, 0.9]),
    beta2=st.sampled_from([0.0, 0.95, 0.999]),
    eps=st.sampled_from([1e-8, 1e-3]),
    weight_decay=st.sampled_from([0.0, 0.1, 1 / 0.3]),
    l2=st.booleans(),
)


@dataclass(frozen=True)
class Plan:
    """One step. Numbers that name shards are taken modulo how many there are."""

    order: int  # seed of the order of arrival
    missing: frozenset[int]  # no gradient in this step
    late: frozenset[int]  # arrive after backward
    again: tuple[tuple[int, int], ...]  # after the n-th arrival shard s gets another gradient, if it has one
    gone: frozenset[int]  # taken back at the end
    scale: float
    poison: float | None
    poisoned_late: bool  # the poisoned gradient is replaced by a good one
    expected: tuple[float, float | None]  # unscale and max_grad_norm while speculating
    decided: tuple[float, float | None]
    hyper: GroupHyper | None  # changed between backward and the verdict
    group: int
    written: int | None  # a shard whose parameter the user writes to
    look: str | None  # quiesce or digests in between
    ends: str
    unsettled: bool = False  # nothing reads masters and moments after the step


NUMBERS = st.one_of(st.just(frozenset[int]()), st.frozensets(st.integers(0, 7), max_size=2))
PLANS = st.builds(
    Plan,
    order=st.integers(0, 1000),
    missing=NUMBERS,
    late=NUMBERS,
    again=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=3).map(tuple),
    gone=NUMBERS,
    scale=st.sampled_from([1.0, 1.0, 1.0, 1e-3, 100.0, 3e4]),
    poison=st.sampled_from([None, None, None, math.nan, math.inf, -math.inf]),
    poisoned_late=st.booleans(),
    expected=st.tuples(UNSCALES, LOOSE),
    decided=st.tuples(UNSCALES, CLIPS),
    hyper=st.one_of(st.none(), st.none(), HYPERS),
    group=st.integers(0, 1),
    written=st.one_of(st.none(), st.none(), st.integers(0, 7)),
    look=st.sampled_from([None, None, None, None, None, None, "quiesce", "digests"]),
    ends=st.sampled_from(["step", "step", "step", "abandon"]),
    unsettled=st.booleans(),
)
# Most steps in a row like in training, so that something is there to commit and journals become cheap.
PLAIN = Plan(
    order=0,
    missing=frozenset(),
    late=frozenset(),
    again=(),
    gone=frozenset(),
    scale=1.0,
    poison=None,
    poisoned_late=False,
    expected=(1.0, None),
    decided=(1.0, None),
    hyper=None,
    group=0,
    written=None,
    look=None,
    ends="step",
)
COMMON = [
    PLAIN,
    replace(PLAIN, order=1),
    replace(PLAIN, unsettled=True),
    replace(PLAIN, unsettled=True, decided=(1.0, 0.5)),
    replace(PLAIN, decided=(1.0, 0.5)),
    replace(PLAIN, poison=math.nan),
    replace(PLAIN, ends="abandon"),
]
SCHEDULES = st.lists(st.one_of(st.sampled_from(COMMON), PLANS), min_size=2, max_size=8)

SETTINGS = st.builds(
    Settings,
    sizes=st.lists(
        st.lists(st.one_of(st.integers(100, 3000), st.integers(0, 5), st.just(1024)), min_size=1, max_size=4),
        min_size=1,
        max_size=2,
    ),
    gradient_dtype=st.sampled_from(DTYPES),
    published_dtype=st.sampled_from(DTYPES),
    mode=st.sampled_from(["always", "always", "adaptive", "never"]),
    bucket_numel=st.sampled_from([1, 1024, 2048, 1 << 20]),
    threads=st.integers(1, 3),
    published=st.sampled_from([None, None, 0.5, 1.0, 1.0]),
    seed=st.integers(0, 1000),
    hyper=HYPERS,
    split=st.booleans(),
)


class Step:
    """Runs one plan on a rig."""

    def __init__(self, rig: Rig, plan: Plan) -> None:
        self.rig, self.plan, self.engine = rig, plan, rig.engine
        self.gradients: dict[int, npt.NDArray[Any]] = {}

    def chosen(self, numbers: frozenset[int]) -> set[int]:
        return {number % len(self.rig.shards) for number in numbers}

    def new_gradient(self, shard: Shard, poison: float | None = None) -> npt.NDArray[Any]:
        return self.rig.gradient(shard, self.plan.scale, poison)

    def arrive(self, shard: Shard, gradient: npt.NDArray[Any], *, in_backward: bool = True) -> None:
        self.gradients[shard.index] = gradient
        self.rig.arrive(shard, gradient, in_backward=in_backward)

    def run(self) -> None:
        rig, plan, engine = self.rig, self.plan, self.engine
        engine.speculator.expect(unscale=plan.expected[0], max_grad_norm=plan.expected[1])
        self.backward()
        rig.check_published_unchanged()
        if plan.hyper is not None:
            rig.set_hyper(plan.group % len(rig.hypers), plan.hyper)
        if plan.written is not None:
            self.write(rig.shards[plan.written % len(rig.shards)])
        for index in self.chosen(plan.gone):
            engine.retract(rig.shards[index])
            self.gradients.pop(index, None)
        self.look()
        if plan.ends == "abandon":
            engine.abandon()
        elif self.gradients:
            unscale, max_grad_norm = plan.decided
            rig.step_both(self.gradients, unscale=unscale, max_grad_norm=max_grad_norm)
        if plan.unsettled:
            rig.check_published_unchanged()
        else:
            rig.check()

    def backward(self) -> None:
        plan, shards = self.plan, self.rig.shards
        missing, late = self.chosen(plan.missing), self.chosen(plan.late)
        order = [int(i) for i in np.random.default_rng(plan.order).permutation(len(shards)) if i not in missing]
        poisoned = order[-1] if order and plan.poison is not None else None  # the others were speculated before
        in_backward = [index for index in order if index not in late]
        for place, index in enumerate(in_backward):
            self.arrive(shards[index], self.new_gradient(shards[index], plan.poison if index == poisoned else None))
            for after, repeated in plan.again:
                if after == place:
                    self.replace(shards[repeated % len(shards)])
        for index in order:
            if index in late:
                self.arrive(shards[index], self.new_gradient(shards[index]), in_backward=False)
        if poisoned is not None and plan.poisoned_late:
            self.replace(shards[poisoned])

    def replace(self, shard: Shard) -> None:
        if self.engine.has_gradient(shard):
            self.engine.retract(shard)
            self.arrive(shard, self.new_gradient(shard))

    def write(self, shard: Shard) -> None:
        """What the optimizer does when a user has written to a parameter."""
        self.engine.restore(shard)
        value = self.rig.random.standard_normal(shard.numel).astype(np.float32)
        shard.write_masters(torch.from_numpy(value))
        written = narrow(value, self.rig.settings.published_format)
        self.rig.published[shard.index].copy_(to_tensor(written))
        parameter = self.rig.reference.parameters[shard.index]
        parameter.master = value
        parameter.published = to_numpy(self.rig.published[shard.index])

    def look(self) -> None:
        """Other code asks for the state of the last finished step."""
        if self.plan.look is None:
            return
        if self.plan.look == "quiesce":
            self.engine.quiesce()
        else:
            assert self.engine.digests() == self.rig.reference.digests()
        assert not any(bucket.state is BucketState.SPECULATED for bucket in self.engine.buckets)
        for shard, parameter in zip(self.rig.shards, self.rig.reference.parameters, strict=True):
            assert_same_bits("master of the last finished step", to_numpy(shard.read_masters()), parameter.master)


def run_schedule(made: Rig, plans: list[Plan]) -> None:
    for plan in plans:
        Step(made, plan).run()


def note_what_happened(made: Rig) -> None:
    """For ``--hypothesis-show-statistics``: whether the schedules reach everything."""
    stats = made.engine.stats()
    for name in (*COUNTERS, "buckets_stepped", "buckets_two_phase", "journal_overflows"):
        event(f"{name}: {'some' if stats[name] else 'none'}")


@settings(max_examples=120)
@given(SETTINGS, SCHEDULES)
def test_any_schedule(described: Settings, plans: list[Plan]) -> None:
    with rig(described) as made:
        run_schedule(made, plans)
        note_what_happened(made)


@settings(max_examples=60)
@given(SETTINGS, SCHEDULES, st.sampled_from([1, 2]), st.sampled_from([0.0, 0.02, 0.2, 12.0]))
def test_any_schedule_with_little_room_for_escapes(
    described: Settings, plans: list[Plan], width: int, arena: float
) -> None:
    with rig(replace(described, mode="always"), width=width, arena=arena) as made:
        run_schedule(made, plans)
        note_what_happened(made)


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize(
    ("mode", "gradient_dtype", "published"),
    [
        *(("always", dtype, None) for dtype in DTYPES),
        *((mode, torch.bfloat16, None) for mode in MODES[::2]),
        *(("never", dtype, 1.0) for dtype in DTYPES),
        ("never", torch.bfloat16, 0.5),
    ],
)
def test_several_chunks_on_several_threads(
    mode: str, gradient_dtype: torch.dtype, published: float | None, *, split: bool
) -> None:
    """Large enough that threads share a bucket: commits, a replay, an overflow, a skip, an undo."""
    described = Settings(
        [[100_000, 7], [66_000]], gradient_dtype, torch.bfloat16, mode, 1 << 17, threads=3, published=published,
        split=split,
    )  # fmt: skip
    plans = [PLAIN, PLAIN, replace(PLAIN, decided=(1.0, 5.0)), replace(PLAIN, scale=1e3)]
    plans += [replace(PLAIN, poison=math.nan), replace(PLAIN, hyper=replace(HYPER, lr=1e-3))]
    plans = [replace(plan, unsettled=True) for plan in plans] + plans
    with rig(described) as made:
        run_schedule(made, plans)
        stats = made.engine.stats()
        assert (stats["buckets_two_phase"] > 0) == (published is not None)
        assert stats["skipped_steps"] == 2
        assert (stats["buckets_speculated"] > 0) == (mode != "never")
