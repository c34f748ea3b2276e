"""Mistakes put into superoffload, to see that programs find them: `python -m tests.fuzz --mutants`.

A fuzzer that passes says something only if it would not pass over these.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch

import superoffload.engine.after_verdict as finisher_module
import superoffload.host.signals as interrupts
import superoffload.optimizer.state_dict as shown_steps_module
from superoffload import _native
from superoffload.engine.after_verdict import Finisher, LastStep
from superoffload.engine.bucket import Bucket, BucketState, Shard
from superoffload.engine.engine import Engine
from superoffload.engine.executor import Executor
from superoffload.engine.snapshot import Snapshot
from superoffload.engine.speculator import Speculator
from superoffload.optimizer.delivery import OnDemand
from superoffload.optimizer.edits import Edits
from superoffload.optimizer.intake import Intake
from superoffload.optimizer.master_updates import MasterUpdates
from superoffload.optimizer.params import Params
from superoffload.optimizer.settings import LossScale, ParamGroups
from superoffload.optimizer.shown_state import ShownStates
from superoffload.optimizer.tracked_param import TrackedParam

Mutant = Callable[[], AbstractContextManager[Any]]
Operation = _native.Operation
_put: Callable[..., Mutant] = partial(partial, mock.patch.object)


def _replaced(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Mutant:
    """``make`` gets the method as it is."""
    return lambda: mock.patch.object(owner, name, make(getattr(owner, name)))


def _submits(change: Callable[[Operation], Operation | None]) -> Mutant:
    """Worker threads are given another operation; None: none."""

    def make(submit: Callable[..., Any]) -> Callable[..., Any]:
        def submitted(executor: Executor, bucket: Bucket, operation: Operation) -> None:
            instead = change(operation)
            if instead is not None:
                submit(executor, bucket, instead)

        return submitted

    return _replaced(Executor, "submit", make)


def _freezes(change: Callable[[Bucket, float], float]) -> Mutant:
    """Buckets are stepped with another factor."""

    def make(freeze: Callable[..., Any]) -> Callable[..., Any]:
        return lambda executor, bucket, factor: freeze(executor, bucket, change(bucket, factor))

    return _replaced(Executor, "freeze", make)


def _nothing(*arguments: Any, **named: Any) -> None: ...


def _marks_undone(speculator: Speculator, bucket: Bucket) -> None:
    if bucket.state is BucketState.SPECULATED:
        speculator.end(bucket)
    if bucket.state is BucketState.SPECULATED:
        speculator._mark_undone(bucket)


def _keeps_old_hyper_parameters(finish: Callable[..., Any]) -> Callable[..., Any]:
    def finished(finisher: Finisher, bucket: Bucket, factor: float) -> None:
        if bucket.state is BucketState.SPECULATED:
            bucket.frozen = finisher._executor.hyper(bucket.group)
        finish(finisher, bucket, factor)

    return finished


def _ignores_overflow(end: Callable[..., Any]) -> Callable[..., Any]:
    return lambda speculator, bucket: speculator._executor.wait(bucket)


def _forgets_one_piece(arrive: Callable[..., Any]) -> Callable[..., Any]:
    def arrived(engine: Engine, shard: Shard, gradient: Any, *, in_backward: bool = True, **named: Any) -> None:
        if engine.stats()["steps"] == 3 and shard.index == 1 and in_backward:
            engine.inbox.arrived[shard.index] = gradient  # known, but not to its buckets
            return
        arrive(engine, shard, gradient, in_backward=in_backward, **named)

    return arrived


def _keeps_the_first(take: Callable[..., Any]) -> Callable[..., Any]:
    def taken(intake: Intake, tracked: TrackedParam) -> None:
        if tracked.gradient.handed is not None and tracked.param.grad is not None:
            tracked.gradient.remember(tracked.param.grad)  # as if it had been packed
            return
        take(intake, tracked)

    return taken


def _forgets_moments(load: Callable[..., Any]) -> Callable[..., Any]:
    def loaded(tracked: TrackedParam, values: Any) -> None:
        load(tracked, values)
        tracked.shard.steps += 1

    return loaded


def _settles_by_the_group_of_now(settle: Callable[..., Any]) -> Callable[..., Any]:
    """The scalars of a published bucket are not frozen until it is settled."""

    def settled(last_step: LastStep) -> None:
        for bucket in last_step._layout.buckets:
            if bucket.state is BucketState.PUBLISHED:
                last_step._executor.freeze(bucket, bucket.factor * 1.0000002)
        settle(last_step)

    return settled


def _loses_counts(move_on: Callable[..., Any]) -> Callable[..., Any]:
    def counted(engine: Engine, verdict: Any, **named: Any) -> None:
        move_on(engine, verdict, **named)
        for bucket in engine.buckets:
            if bucket.state is BucketState.REPLAYED:
                bucket.pieces[0].shard.steps -= 1

    return counted


def _takes_nothing_back(take: Callable[..., Any]) -> Callable[..., Any]:
    def taken(engine: Engine, state: BucketState) -> int:
        kept = [bucket for bucket in engine.buckets if bucket.state is BucketState.SPECULATED]
        for bucket in kept:
            engine.executor.wait(bucket)
            bucket.move(state)
        return len(kept) + int(take(engine, state))

    return taken


def _reopens_without_undo(engine: Engine, arrivals: Any) -> None:
    for shard, _ in arrivals:
        for bucket in engine._incomplete.intersection(engine.layout.buckets_of(shard)):
            engine._incomplete.discard(bucket)
            bucket.waits_for_all = True


class _ForgetsDevices:
    """torch, but what it makes is on the caller's default device."""

    def __getattr__(self, name: str) -> Any:
        made = getattr(torch, name)
        return (lambda *sizes, device, **named: made(*sizes, **named)) if name == "zeros" else made


MUTANTS: dict[str, Mutant] = {
    "devices: the number of steps is made on the caller's default device": _put(
        shown_steps_module, "torch", _ForgetsDevices()
    ),
    "undo: nothing is undone": _submits(lambda operation: None if operation is Operation.undo else operation),
    "undo: left out where a gradient was not final": _put(Speculator, "undo", _marks_undone),
    "replay: a plain step on top of the speculated one": _submits(
        lambda operation: Operation.step if operation is Operation.replay else operation
    ),
    "replay: speculated with the wrong factor, committed all the same": _put(
        finisher_module, "_same_bits", lambda factor, other: True
    ),
    "replay: the factor is one unit in the last place off": _freezes(
        lambda bucket, factor: factor * (1.0000002 if bucket.state is BucketState.SPECULATED else 1.0)
    ),
    "replay: its step is not counted": _replaced(Engine, "_move_on", _loses_counts),
    "hyper-parameters: changed after speculation, committed all the same": _replaced(
        Finisher, "finish", _keeps_old_hyper_parameters
    ),
    "journal: overflow is ignored": _replaced(Speculator, "end", _ignores_overflow),
    "arrival: one gradient of the fourth step reaches no bucket": _replaced(Engine, "arrive", _forgets_one_piece),
    "arrival: a second backward is taken for the same gradient": _replaced(Intake, "take", _keeps_the_first),
    "arrival: a late gradient undoes nothing": _put(Engine, "_reopen", _reopens_without_undo),
    "arrival: a late gradient counts as one in time": _put(Engine, "_reopen", _nothing),
    "edits: of gradients are not noticed": _put(Edits, "is_edited", lambda *_: False),
    "writes: masters do not follow written parameters": _put(MasterUpdates, "follow", _nothing),
    "writes: a master follows without undoing what is speculated": _put(Engine, "restore", _nothing),
    "two phases: nothing is settled": _put(
        LastStep,
        "_settle_behind",
        lambda last_step: last_step.unsettled.update(
            {
                b: _native.Completion.already_done()
                for b in last_step._layout.buckets
                if b.state is BucketState.PUBLISHED
            }
        ),
    ),
    "two phases: settled with another factor than published": _replaced(
        LastStep, "_settle_behind", _settles_by_the_group_of_now
    ),
    "two phases: readers do not wait": _put(LastStep, "settle", _nothing),
    "on demand: forward does not wait": _put(OnDemand, "wait", _nothing),
    "scaler: its scale is not taken out": _put(LossScale, "inverse", 1.0),
    "skip: nothing is taken back": _replaced(Engine, "_take_back", _takes_nothing_back),
    "save: a step does not wait for it": _put(Snapshot, "protect", _nothing),
    "load: one step too many": _replaced(TrackedParam, "load", _forgets_moments),
    "look: what is speculated shows": _put(Engine, "quiesce", _nothing),
    "state: what is speculated shows": _put(Engine, "reveal", _nothing),
    "state: a bucket is speculated although a program keeps its state": _put(Bucket, "held", None),
    "state: what a program takes out stays": _put(ShownStates, "find_edits", lambda states: []),
    "state: a number of steps that a program writes is not used": _put(Params, "_find_steps", lambda params: {}),
    "groups: what a program moves or takes out stays": _put(ParamGroups, "changed", lambda groups: False),
    "memory: parameters that share it are stepped": _put(Params, "check_apart", _nothing),
    "signals: they come in the middle of bookkeeping": _put(interrupts, "held_signals", nullcontext),
}
