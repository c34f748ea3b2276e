"""The core: speculation over buckets. Works on shards and gradients; knows nothing of autograd or host frameworks.

One step: ``arrive`` for every final gradient (buckets that become complete are packed and, where the policy wants
it, stepped at once by the worker threads), then ``decide`` and ``apply``, or ``abandon``. Until ``apply`` delivers,
nothing outside the core's own masters and moments has changed. The layers below are in superoffload/pipeline.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, overload

import numpy as np
import torch
from torch import Tensor

from superoffload import _native
from superoffload.bucket import Bucket, BucketState, GroupHyper, Shard
from superoffload.engine.listener import Listener
from superoffload.errors import DeviceError, StateError, TornStep
from superoffload.link import Link
from superoffload.pipeline.adding import Adding
from superoffload.pipeline.layout import JOURNAL_BYTES_PER_PARAM
from superoffload.pipeline.options import CoreOptions
from superoffload.placement import Placer
from superoffload.policy import learn_from_journal
from superoffload.schedule import Situation
from superoffload.verdict import Verdict, decide

__all__ = ["JOURNAL_BYTES_PER_PARAM", "Core", "CoreOptions", "SumExchange"]

Operation = _native.Operation


class SumExchange(Protocol):
    """Sums of squares of every rank; ``start`` and ``finish`` are called once per step."""

    def start(self, sums: Mapping[int, float]) -> None:
        """Those of this rank's shards, by index, in registration order."""

    def finish(self) -> Sequence[float] | None:
        """Those of all ranks, the same on each, in the order to fold them; None if no rank has a gradient."""


class Core(Adding):
    """The step. ``hyper_of(group)`` returns a group's current hyper-parameters."""

    def __init__(
        self,
        link: Link,
        options: CoreOptions,
        hyper_of: Callable[[int], GroupHyper],
        *,
        listener: Listener | None = None,
        placer: Placer | None = None,
    ) -> None:
        super().__init__(link, options, hyper_of)
        self.listener = listener or Listener()
        self.placer = placer
        self._shared = False  # the verdict of this step is also that of other ranks
        self._in_two_phases: set[Bucket] = set()  # chosen for this step
        self._journaled_numel = 0
        self._journaled_bytes = 0

    # ---- the end of a step ------------------------------------------------------------------------------------

    @overload
    def decide(self, *, unscale: float, max_grad_norm: float | None) -> Verdict: ...

    @overload
    def decide(
        self, *, unscale: float, max_grad_norm: float | None, exchange: SumExchange | None
    ) -> Verdict | None: ...

    def decide(
        self, *, unscale: float, max_grad_norm: float | None, exchange: SumExchange | None = None
    ) -> Verdict | None:
        """Packs what is not packed yet and folds the verdict from all gradients that arrived.

        With ``exchange``: from those of all ranks; None if no rank has any.
        """
        self.link.check_stream()
        deciding = self._clock()
        held_up = self._stopwatch.held_up_so_far
        self._finish_before()
        if self.timeline is not None:
            self.timeline.deciding()
        for bucket in self.buckets:
            if bucket.state is BucketState.FILLING and any(bucket.present):
                self._pack(bucket)
        with self._caller_at_work():
            self._wait_for_arrivals()
            sums = {shard.index: shard.sum_of_squares() for shard in self.shards if shard.index in self._incoming}
        computed = self._stopwatch.computed(deciding, held_up)
        if computed is not None:
            self.policy.computed(*computed)
        if exchange is None:
            return decide(sums.values(), unscale=unscale, max_grad_norm=max_grad_norm)
        with self._caller_at_work():
            exchange.start(sums)
            for bucket in self.buckets:  # the tail of the pipeline runs while the sums travel
                if bucket.state is BucketState.SPECULATED and not self.link.asynchronous:
                    self._end_speculation(bucket)
            everybodys = exchange.finish()
        if everybodys is None:
            return None
        self._shared = True
        return decide(everybodys, unscale=unscale, max_grad_norm=max_grad_norm)

    def apply(self, verdict: Verdict, *, later: bool = False) -> None:
        """Commit, replay or step every bucket that has gradients, and deliver; or skip the step on found_inf.

        ``later``: buckets may still be stepped when this returns, and ``land()`` delivers them; their gradients must
        stay where they are until then.

        WorkerError: a worker failed. During speculation: the step was abandoned, nothing has changed. After the
        verdict, or where other ranks share it: the step was completed all the same, then the error is raised.
        """
        if any(bucket.state is BucketState.FILLING and any(bucket.present) for bucket in self.buckets):
            raise StateError("apply(): gradients arrived since decide(); the verdict does not know them")
        with self._caller_at_work():
            self._hypers.clear()  # they may have changed since they were speculated with
            self.policy.observe(verdict)
            if self.timeline is not None:
                self.timeline.decided(verdict)
            self._withdraw()
            if verdict.found_inf:
                self._stats.buckets_skipped += self._take_back(BucketState.SKIPPED)
                self._stats.skipped_steps += 1
                self._end_step(whole=True)
                self._raise_failure()
                return
            self._end_all_speculation()
            moving = [bucket for bucket in reversed(self.buckets) if bucket.state is not BucketState.FILLING]
            later = later and self._observed  # the buckets of the first step make way for those in observed order
            on_host = [bucket for bucket in moving if not bucket.resident]
            self._choose_two_phases(on_host, on_demand=later)
            self._step_resident([bucket for bucket in moving if bucket.resident], verdict.gradient_factor)
            for bucket in on_host:
                self._finish(bucket, verdict.gradient_factor)
            self._settle_behind()
            self._landing = dict.fromkeys(on_host)
            self._count_step(verdict)
            if not later:
                self._deliver(on_host)
            elif self.link.asynchronous:
                self._send_up(on_host)
            self._end_step(whole=True)
            self._raise_failure()

    def _choose_two_phases(self, moving: Sequence[Bucket], *, on_demand: bool) -> None:
        """Which buckets that wait for the verdict are published now and settled later: the first in forward order."""
        self._in_two_phases.clear()
        numel = sum(bucket.numel for bucket in moving)
        ready = [bucket for bucket in moving if bucket.state is BucketState.READY]
        waiting = sum(bucket.numel for bucket in ready)
        if not (self._may_settle_later and self._observed and numel):
            return
        self.policy.speculated(1.0 - waiting / numel)
        situation = Situation(numel, waiting, len(moving), apart=self.link.asynchronous, on_demand=on_demand)
        left = self.policy.publishes(situation) * waiting
        for bucket in ready:
            if left < bucket.numel / 2:
                break
            left -= bucket.numel
            self._in_two_phases.add(bucket)

    def settle_speculation(self) -> None:
        """Waits for what was speculated. WorkerError: a worker failed, the step was abandoned, nothing has changed.

        For callers who tell other ranks before any of them acts on the verdict.
        """
        with self._caller_at_work():
            self._end_all_speculation()

    def _end_all_speculation(self) -> None:
        """Every speculated bucket done; if a worker failed, the whole step is abandoned before anything shows.

        Not when other ranks act on the same verdict: they cannot take the step back any more, so it is completed here
        too, from the buckets as they were, and the error is raised with the step done.
        """
        self._journaled_numel = self._journaled_bytes = 0
        for bucket in self.buckets:
            if bucket.state is not BucketState.SPECULATED:
                continue
            self._end_speculation(bucket)
            if bucket.state is BucketState.SPECULATED:
                use = bucket.work.journal_use()
                learn_from_journal(bucket, bucket.width, use)
                self._journaled_numel += bucket.numel
                self._journaled_bytes += use.bytes
        if self._failure is not None and not self._shared:
            self._abandon_step()
            self._raise_failure()

    def _finish(self, bucket: Bucket, factor: float) -> None:
        if bucket.state is BucketState.SPECULATED and bucket.frozen != self._hyper(bucket.group):
            self._undo_one(bucket)  # lr, betas, eps or weight_decay changed after speculation
        if bucket.state is BucketState.SPECULATED:
            if _same_bits(bucket.factor, factor):
                bucket.move(BucketState.COMMITTED)
                self._stats.buckets_committed += 1
                return
            self.link.unstage(bucket)  # the replay writes the shadow that it was copied from
            self._freeze(bucket, factor)
            self._submit(bucket, Operation.replay)
            bucket.move(BucketState.REPLAYED)
            self._stats.buckets_replayed += 1
            return
        self.protect(piece.shard for piece in bucket.pieces)
        self._freeze(bucket, factor)
        if bucket in self._in_two_phases:
            self._submit(bucket, Operation.publish)
            bucket.move(BucketState.PUBLISHED)
            self._stats.buckets_two_phase += 1
            return
        self._submit(bucket, Operation.step)
        bucket.move(BucketState.STEPPED)
        self._stats.buckets_stepped += 1

    def _step_resident(self, buckets: Sequence[Bucket], factor: float) -> None:
        """First of all: if the device refuses the first of them, nothing has changed and the step is abandoned."""
        for number, bucket in enumerate(buckets):
            assert self.placer is not None
            self.protect(piece.shard for piece in bucket.pieces)
            self._freeze(bucket, factor)
            try:
                self.placer.residency.step(bucket)
            except DeviceError as error:
                if number or self._shared:
                    raise TornStep(
                        f"{error}; some parameters are of this step and some of the one before, make a new optimizer "
                        "and load the last checkpoint"
                    ) from error
                self._abandon_step()
                raise
            bucket.move(BucketState.STEPPED)
            self._stats.buckets_stepped += 1

    def _count_step(self, verdict: Verdict) -> None:
        for index in self._incoming:
            self.shards[index].steps += 1
        self._stats.steps += 1
        self._stats.clipped_steps += verdict.clip_coefficient < 1.0
        self._stats.journal_bytes += self._journaled_bytes
        if self._journaled_numel:
            self._stats.journal_bytes_per_param = self._journaled_bytes / self._journaled_numel

    def abandon(self) -> None:
        """Ends the step with nothing changed: the user never called ``step()``."""
        if not self._incoming:
            return
        self._finish_before()
        with self._caller_at_work():
            self._abandon_step()
            self._raise_failure()

    def _end_step(self, *, whole: bool) -> None:
        super()._end_step(whole=whole)
        self._shared = False
        order, self._order = self._order, []
        if whole and not self._observed and order:
            self._follow_observed_order(order)
        elif whole and self._observed and self.placer is not None and self.placer.is_due():
            self._place_by_measurement(self.placer)

    def _place_by_measurement(self, placer: Placer) -> None:
        """placement="auto", once: after some steps it is known what the processors cannot hide."""
        measured = self._measured()
        if measured is None:
            placer.wait_longer()
            return
        self.land()
        self.settle()
        placer.measure(measured)
        if self._place():
            self._lay_out_again()

    # ---- figures, digests, the end ----------------------------------------------------------------------------

    def stats(self) -> dict[str, float | int]:
        """Totals since construction (superoffload/stats.py)."""
        self._stats.optimizer_seconds = self.pool.busy_seconds
        self._stats.bytes_down = self.link.bytes_down
        self._stats.bytes_up = self.link.bytes_up
        self._stats.bytes_up_early = self.link.bytes_up_early
        self._stats.pinned_bytes = self.link.pinned_bytes
        self._stats.params_on_device = sum(shard.numel for shard in self.shards if shard.resident)
        return self._stats.as_dict()

    def digests(self) -> dict[str, str]:
        """SHA-256 over all shards in registration order: masters, moments and published parameters."""
        self.quiesce()
        columns: dict[str, Callable[[Shard], Tensor]] = {
            "master": lambda shard: shard.master,
            "exp_avg": lambda shard: shard.exp_avg,
            "exp_avg_sq": lambda shard: shard.exp_avg_sq,
            "published": lambda shard: shard.target(),
        }
        result = {}
        for name, column in columns.items():
            digest = hashlib.sha256()
            for shard in self.shards:
                if shard.numel == 0:  # nothing to digest, and without strides that a view needs
                    continue
                digest.update(column(shard).to("cpu").contiguous().view(torch.uint8).numpy().data)
            result[name] = digest.hexdigest()
        return result

    def close(self) -> None:
        """Takes back what was speculated and ends the worker threads."""
        try:
            self._finish_before()
            self.abandon()
            self._raise_failure()
        finally:
            self.end_threads()

    def end_threads(self) -> None:
        """Worker threads, then the link's: after that nothing writes to anybody's memory any more."""
        self.pool.close()
        self.link.close()

    def __del__(self) -> None:
        # Workers must have ended before the tensors that they write to are freed, in whatever order that happens.
        if hasattr(self, "pool"):
            self.end_threads()


def _same_bits(factor: float, other: float) -> bool:
    """As the kernels round them; of the two zeros each is only itself."""
    with np.errstate(over="ignore", under="ignore"):
        return bool(np.float32(factor).tobytes() == np.float32(other).tobytes())
