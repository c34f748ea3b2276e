"""Runs a program twice, speculating and waiting for every verdict, and compares what their users have seen."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from tests.fuzz import changes, storage, training
from tests.fuzz.forced import forced
from tests.fuzz.program import Op, Program
from tests.fuzz.world import Seen, World
from tests.support.adamw_training import COUNTERS
from tests.support.callers_modes import MODES

OPERATIONS: dict[str, Callable[[World, Op], None]] = {
    name: operation
    for module in (training, changes, storage)
    for name, operation in vars(module).items()
    if getattr(operation, "__module__", "") == module.__name__ and not name.startswith("_")
}
COUNTED = (
    *(*COUNTERS, "buckets_speculated", "buckets_stepped", "buckets_two_phase"),
    *("journal_overflows", "steps", "skipped_steps", "clipped_steps"),
)


class SeesAnotherResult(AssertionError):
    """The two runs differ."""


def run_both(program: Program, folder: Path) -> Seen:
    """What the run that speculates has seen; raises where the other one has seen anything else."""
    with forced(program.settings), _mode_of(program):
        ours = _run(program, World(program, folder))
    waited = _run(program, World(program, folder, ours))
    for mine, theirs in zip(ours.trace, waited.trace, strict=False):
        if mine != theirs:
            at, what, value = mine
            op = program.ops[at] if at < len(program.ops) else "the end"
            raise SeesAnotherResult(f"{what}: after operation {at} ({op}) {value}, waiting {theirs}")
    if len(ours.trace) != len(waited.trace):
        raise SeesAnotherResult(f"length: {len(ours.trace)} things, waiting {len(waited.trace)}")
    return ours


def _mode_of(program: Program) -> AbstractContextManager[Any]:
    mode = program.settings.mode
    return nullcontext() if mode is None else MODES[mode]()


def _run(program: Program, world: World) -> Seen:
    if program.settings.mode is not None and world.speculates:
        world.count(f"mode, {program.settings.mode}")
    with world.optimizer:
        for number, op in enumerate(program.ops):
            world.at = number
            if world.optimizer._engine.last_step.is_settling:
                world.count(f"{op['do']} while settling")
            if world.is_saving():
                world.count(f"{op['do']} while saving")
            OPERATIONS[op["do"]](world, op)
            world.count(op["do"])
        world.wait_for_savings()
        world.at = len(program.ops)
        world.note("digests", world.optimizer.state_digests())
        for slot in world.slots:
            storage.load(world, {"do": "load", "slot": slot})
            world.note("digests", world.optimizer.state_digests())
    stats = world.optimizer.stats()
    for name in COUNTED:
        world.seen.counts[name] += int(stats[name])
    if stats["buckets_speculated"] != sum(stats[name] for name in COUNTERS):
        raise SeesAnotherResult(f"counters: {stats}")
    return world.seen
