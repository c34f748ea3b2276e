"""One seed, one schedule: a few steps of a small model in virtual time, in which everything happens that can happen.

Gradients arrive in any order, late, twice or not at all; they are taken back, poisoned or lost on the link; verdicts
clip, skip or commit; hyper-parameters change and parameters are written to; a reader looks at the state, takes a
snapshot, abandons a step or lets a worker fail. Buckets are speculated, stepped in one pass or in two phases; their
parameters travel before the verdict or after it, and are delivered at once or on demand, as chance or the real schedule
has it, behind one to eight micro-batches. Each step is checked against a plain model; an error names the seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.emulation.clock import VirtualClock
from benchmarks.emulation.link import VirtualLink
from benchmarks.emulation.virtual_pool import VirtualPool
from superoffload.engine.bucket import GroupHyper, Shard
from superoffload.engine.engine import Engine
from superoffload.engine.master_halves import UpperHalves
from superoffload.engine.moments import stored_numel
from superoffload.engine.options import EngineOptions
from superoffload.engine.schedule import Schedule, Situation
from superoffload.engine.verdict import Verdict
from superoffload.errors import WorkerError
from tests.simulator.plain import STATE, PlainModel, PlainShard, state_of, words

_SIZES = (0, 1, 5, 64, 300, 700, 1024, 1025, 1500, 2100)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_HYPERS = (
    GroupHyper(1e-2, 0.9, 0.99, 1e-8, 0.1),
    GroupHyper(1e-3, 0.9, 0.999, 1e-8, 0.0),
    GroupHyper(0.3, 0.0, 0.95, 1e-3, 0.1),
    GroupHyper(0.0, 0.5, 0.0, 1e-8, 0.1, l2=True),
)
_CLIPS = (None, 1e4, 30.0, 10.0, 1.0, 1e-3)
_UNSCALES = (1.0, 1.0, 1.0, 1.0, 0.5, 2.0**-16)
_COUNTED = ("committed", "replayed", "undone", "skipped", "abandoned")


class BrokenPromiseError(AssertionError):
    """Something that must never happen has happened."""


def check_state(shard: Shard, expected: list[Tensor], otherwise: str) -> None:
    for name, here, there in zip(STATE, state_of(shard), expected, strict=True):
        if not torch.equal(words(here), words(there)):
            raise BrokenPromiseError(f"{shard.name}: {name} {otherwise}")


class _ByChance(Schedule):
    """Any choice that the real schedule could make, and some that it would not."""

    def __init__(self, source: random.Random) -> None:
        super().__init__("always")
        self._source = source

    def should_speculate(self, packed: float = 0.0) -> bool:
        return self._source.random() < 0.8

    def share_to_publish(self, situation: Situation) -> float:
        return self._source.choice((0.0, 0.3, 0.5, 1.0, 1.0))


class _Snapshot:
    """A reader of the state of an earlier moment: the state may change once ``protect`` was asked."""

    over = False

    def __init__(self, shards: Iterable[Shard]) -> None:
        self._then = {shard.index: [part.clone() for part in state_of(shard)] for shard in shards}

    def protect(self, shards: Iterable[Shard]) -> None:
        for shard in shards:
            if (then := self._then.pop(shard.index, None)) is not None:
                check_state(shard, then, "changed before a snapshot's reader was asked")


class Simulation:
    """``run()`` does all of it and raises what went wrong; ``log`` says what was done, the last things last."""

    def __init__(self, seed: int, steps: int = 3) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self._numbers = np.random.default_rng(seed)
        self._steps = steps
        self.log: list[str] = []
        self.clock = VirtualClock()
        self.errors = 0
        self._hypers = [self.chance.choice(_HYPERS) for _ in range(2)]
        self.pool = VirtualPool(
            self.clock, lambda operation, numel: self._delay(), at_once=lambda: self.chance.random() < 0.5
        )
        self.link = VirtualLink(self.clock, self._delay, self._delay, stages=lambda bucket: self._happens(0.7))
        self.engine = Engine(self.link, self._options(), lambda group: self._hypers[group])
        self._add_shards()
        self.plain = PlainModel(self.engine.shards, lambda group: self._hypers[group])
        self._gradients: dict[int, Tensor] = {}
        self._snapshot: _Snapshot | None = None
        self._undelivered: dict[int, Tensor] = {}  # what readers may still see of a parameter

    # ---- the world --------------------------------------------------------------------------------------------

    def _options(self) -> EngineOptions:
        kind = self.chance.random()
        schedule = _ByChance(self.chance) if kind < 0.6 else Schedule("adaptive" if kind < 0.9 else "never")
        bucket_numel = self.chance.choice((1024, 1024, 2048))
        mocks: dict[str, Any] = {"schedule": schedule, "clock": self.clock.seconds, "pool": self.pool}
        return EngineOptions(schedule.mode, bucket_numel, [-1], two_phase=True, **mocks)

    def _delay(self, size: int = 0) -> float:
        return self.chance.choice((0.0, 1.0, 1.0, 5.0)) * self.chance.random()

    def _add_shards(self) -> None:
        gradient_dtype, published_dtype = self.chance.choice(_DTYPES), self.chance.choice(_DTYPES)
        split = published_dtype == torch.bfloat16 and self.seed % 2 == 1
        groups, shards = self.chance.randint(1, 2), []
        moments = (torch.float32, torch.bfloat16, torch.uint8)[self.seed // 10 % 3]
        for index in range(self.chance.randint(1, 5)):
            numel = self.chance.choice(_SIZES)
            published = self._random(numel, published_dtype)
            first, second = (torch.zeros(stored_numel(numel, moments), dtype=moments) for _ in range(2))
            shards.append(
                Shard(
                    index=index, name=f"shard {index}", group=index % groups, numel=numel,
                    gradient_dtype=gradient_dtype, published_dtype=published_dtype,
                    master=torch.zeros(numel, dtype=torch.int16) if split else published.float().clone(),
                    exp_avg=first, exp_avg_sq=second, target=partial(lambda it: it, published),
                    upper=UpperHalves(published) if split else None,
                )
            )  # fmt: skip
        self.engine.layout.add_shards(shards)

    def _random(self, numel: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        return torch.from_numpy(self._numbers.standard_normal(numel, np.float32)).mul_(scale).to(dtype)

    def _happens(self, probability: float) -> bool:
        return self.chance.random() < probability

    def _any_shard(self) -> Shard:
        return self.chance.choice(self.engine.shards)

    def _call(self, what: str, call: Callable[[], object]) -> bool:
        """False: a worker failure came out of it."""
        self.log.append(f"{self.clock.now:8.3f} {what}")
        try:
            call()
        except WorkerError as error:
            self.errors += 1
            self.log.append(f"{self.clock.now:8.3f}   {error}")
            if self._gradients and not self.engine.is_filling:
                self._gradients = {}  # the step was abandoned
            return False
        return True

    # ---- one schedule -----------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            for _ in range(self._steps):
                for _ in range(self.chance.choice((*[1] * 8, 2, 8))):  # micro-batches
                    self._forward()
                self._step()
            self._end()
        except Exception as error:
            steps = "" if self._steps == 3 else f" --steps {self._steps}"
            raise BrokenPromiseError(
                f"seed {self.seed}: {type(error).__name__}: {error}\nrepeat it with: python -m "
                f"tests.simulator --seed {self.seed}{steps}\nwhat was done:\n  " + "\n  ".join(self.log[-40:])
            ) from error

    def _forward(self) -> None:
        """Readers on demand, and whatever else happens before the gradients of a step."""
        for shard in self.engine.shards:
            if self._happens(0.5):
                self.clock.advance(self._delay())
            if self._happens(0.5):
                self._call(f"land {shard.index}", partial(self.engine.last_step.land, shard))
                self._undelivered.pop(shard.index, None)
            self._check_published(shard)
        self._meanwhile(0.15)

    def _step(self) -> None:
        self._gradients = {}
        self._expected = self.chance.choice(_UNSCALES), self.chance.choice(_CLIPS)
        self.engine.speculator.expect(unscale=self._expected[0], max_grad_norm=self._expected[1])
        if self._happens(0.12):
            self.pool.inject_fault(self.chance.randint(0, 12), "planted")
        if self._happens(0.03):
            self.link.lose(self.chance.randint(0, 3), "the copy was lost")
        self._backward()
        self._meanwhile(0.15)
        for shard in self.engine.shards:
            self._check_published(shard)
        if self._happens(0.08):
            self._call("abandon", self.engine.abandon)
            self._gradients = {}
        if self._gradients:
            self._boundary()
        self._check()

    def _backward(self) -> None:
        order = list(reversed(self.engine.shards))
        if self._happens(0.3):
            self.chance.shuffle(order)
        poisoned = self.chance.choice(order) if self._happens(0.1) else None
        scale = self.chance.choice((1.0, 1.0, 1.0, 1e-3, 100.0))
        for shard in order:
            if self._happens(0.08):
                continue
            self.clock.advance(self._delay() if self._happens(0.7) else 0.0)
            errors = self.errors
            self._arrive(shard, scale, poisoned is shard, in_backward=not self._happens(0.1))
            if self.errors > errors and not self._gradients:
                return  # what the caller of backward gets to see
            if self._happens(0.1):
                again = self.chance.choice(sorted(self._gradients))
                self._retract(self.engine.shards[again])
                if self._happens(0.7):
                    self._arrive(self.engine.shards[again], scale, False, in_backward=True)
            self._meanwhile(0.04)

    def _arrive(self, shard: Shard, scale: float, poisoned: bool, *, in_backward: bool) -> None:
        gradient = self._random(shard.numel, shard.gradient_dtype, scale)
        if poisoned and shard.numel:
            gradient[self.chance.randrange(shard.numel)] = self.chance.choice((math.nan, math.inf, -math.inf))
        theirs = gradient.clone()

        def arrive() -> None:
            self.engine.arrive(shard, theirs, in_backward=in_backward)

        self._gradients[shard.index] = gradient
        if not self._call(f"arrive {shard.index}", arrive):
            if not self._gradients:
                return
            if not self.engine.has_gradient(shard):  # it was refused for what had failed before
                self._call(f"arrive {shard.index} again", arrive)
        self._undelivered.pop(shard.index, None)
        if all(bucket.missing == 0 for bucket in self.engine.layout.buckets_of(shard)):
            theirs.fill_(7.0)  # packed: what the memory holds from now on does not count

    def _retract(self, shard: Shard) -> None:
        self._call(f"retract {shard.index}", lambda: self.engine.retract(shard))
        self._gradients.pop(shard.index, None)

    def _boundary(self) -> None:
        engine, plain, gradients = self.engine, self.plain, dict(self._gradients)
        unscale, max_grad_norm = self._expected if self._happens(0.8) else (0.25, self.chance.choice(_CLIPS))
        expected = plain.decide(gradients, unscale, max_grad_norm)
        found: list[Verdict] = []
        decide = partial(engine.decide, unscale=unscale, max_grad_norm=max_grad_norm)
        if not self._call(f"decide, clipping at {max_grad_norm}", lambda: found.append(decide())):
            return  # a gradient was lost: abandoned
        self._undelivered.clear()
        self._must(repr(found[0]) == repr(expected), f"verdict {found[0]}, expected {expected}")
        before = engine.stats()
        old = {shard.index: shard.target().clone() for shard in engine.shards}
        later = self._happens(0.5)
        self._call(f"apply {expected} later={later}", lambda: engine.apply(expected, later=later))
        after = engine.stats()
        if after["steps"] + after["skipped_steps"] == before["steps"] + before["skipped_steps"]:
            self._must(self.errors > 0, "a step went missing")
            return
        plain.apply(gradients, expected)
        if later and not expected.found_inf:
            self._undelivered = {index: old[index] for index in gradients}

    # ---- what else may happen at any time ---------------------------------------------------------------------

    def _meanwhile(self, probability: float) -> None:
        if self._happens(probability):
            self.chance.choice((self._look, self._look, self._write, self._new_hyper, self._snap, self._settle))()

    def _look(self) -> None:
        """A reader wants the state of the last finished step."""
        if self._call("quiesce", self.engine.quiesce):
            self._undelivered.clear()
            for shard, plain in zip(self.engine.shards, self.plain.shards, strict=True):
                self._compare(shard, plain)

    def _settle(self) -> None:
        shard = self._any_shard()
        self._call(f"settle {shard.index}", lambda: self.engine.last_step.settle(shard))

    def _write(self) -> None:
        """A user writes to a parameter: what is in flight for it is taken back first."""
        shard = self._any_shard()
        self._call(f"write {shard.index}", lambda: self.engine.restore(shard))
        self._undelivered.pop(shard.index, None)
        plain = self.plain.shards[shard.index]
        self._compare(shard, plain)
        value = self._random(shard.numel, shard.published_dtype)
        self.engine.snapshots.protect([shard])
        shard.write_masters(value.float())
        shard.target().copy_(value)
        plain.write(value)

    def _new_hyper(self) -> None:
        group = self.chance.randrange(2)
        self._hypers[group] = self.chance.choice(_HYPERS)
        self.log.append(f"{self.clock.now:8.3f} new hyper-parameters for group {group}")

    def _snap(self) -> None:
        if not self._call("snapshot", self.engine.quiesce):
            return
        self._undelivered.clear()
        if self._snapshot is not None:
            self._snapshot.protect(self.engine.shards)  # what it was not asked about has not changed
        stands_for: Any = _Snapshot(self.engine.shards)
        self._snapshot = stands_for
        self.engine.snapshots.open.clear()
        self.engine.snapshots.add(stands_for)

    # ---- the promises -----------------------------------------------------------------------------------------

    def _must(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise BrokenPromiseError(otherwise)

    def _check(self) -> None:
        """After a step: everything where waiting is allowed, else what can be seen without it."""
        engine = self.engine
        self._must(not engine.is_filling, "a step left gradients behind")
        if self._happens(0.5):
            self._call("settle", engine.last_step.settle)
            for shard, plain in zip(engine.shards, self.plain.shards, strict=True):
                self._compare(shard, plain, published=False)
        for shard, plain in zip(engine.shards, self.plain.shards, strict=True):
            self._must(shard.steps == plain.steps, f"{shard.name}: {shard.steps} steps, expected {plain.steps}")
            self._check_published(shard)
        stats = engine.stats()
        ended = sum(stats[f"buckets_{fate}"] for fate in _COUNTED)
        self._must(stats["buckets_speculated"] == ended, f"speculated buckets without an end: {stats}")
        exposed, all_of_it = stats["optimizer_seconds_exposed"], stats["optimizer_seconds"]
        self._must(exposed <= all_of_it + 1e-9, "more exposed than there is")

    def _check_published(self, shard: Shard) -> None:
        """Only ``apply`` changes a parameter; on demand, its readers see the old value until they ask."""
        seen, plain = shard.target(), self.plain.shards[shard.index]
        old = self._undelivered.get(shard.index, plain.published)
        now, then, new = map(words, (seen, old, plain.published))
        # A shard in several buckets is delivered bucket by bucket.
        both = ((now == then) | (now == new)).all()
        self._must(bool(both), f"{shard.name}: a parameter is neither the old one nor the new one")

    def _compare(self, shard: Shard, plain: PlainShard, *, published: bool = True) -> None:
        check_state(shard, plain.state(), "is not that of the plain model")
        same = not published or torch.equal(words(shard.target()), words(plain.published))
        self._must(same, f"{shard.name}: the published parameter is not that of the plain model")

    def _end(self) -> None:
        """At the end nothing runs, every failure was told once, and the state is that of the last step."""
        self.pool.cancel_fault()
        while not self._call("quiesce", self.engine.quiesce):
            self._must(self.errors < 100, "a failure is raised again and again")
        self._call("close", self.engine.close)
        self.clock.run_dry()
        if self._snapshot is not None:
            self._snapshot.protect(self.engine.shards)  # what it was not asked about has not changed
        for shard, plain in zip(self.engine.shards, self.plain.shards, strict=True):
            self._compare(shard, plain)
        # A lost copy of a gradient that was taken back is no failure; lost ones that were needed change the bits.
        least, most = self.pool.faults, self.pool.faults + self.link.losses
        self._must(min(least, 1) <= self.errors <= most, f"{least} to {most} failures were told {self.errors} times")
