"""The engine: one step over buckets. Works on shards and gradients; knows nothing of autograd or host frameworks.

One step: ``arrive`` for every final gradient (buckets that become complete are packed and, where the schedule wants
it, stepped at once by the worker threads), then ``decide`` and ``apply``, or ``abandon``. Until ``apply`` delivers,
nothing outside the engine's own masters and moments has changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import overload

import torch
from torch import Tensor

from superoffload.engine.bucket import Bucket, BucketState, Shard, sums_of_squares
from superoffload.engine.digests import digests_of
from superoffload.engine.engine_parts import EngineParts
from superoffload.engine.placement import Placer
from superoffload.engine.verdict import SumExchange, Verdict, decide
from superoffload.errors import DeviceError, StateError


class Engine(EngineParts):
    """Coordinates the step over parts that each own what they are about."""

    _shared = False  # the verdict of this step is also that of other ranks

    # ---- gradients --------------------------------------------------------------------------------------------

    def has_gradient(self, shard: Shard) -> bool:
        """Whether a gradient of ``shard`` has arrived in this step."""
        return shard.index in self.inbox.arrived

    @property
    def is_filling(self) -> bool:
        """Whether any gradient has arrived in this step."""
        return bool(self.inbox.arrived)

    def widen(self, shards: Iterable[Shard]) -> None:
        """Lays buckets out anew, with the gradients of these shards in fp32; not where some of this step are packed."""
        narrow = [shard for shard in shards if shard.gradient_dtype != torch.float32]
        if not narrow:
            return
        self.tail.finish()
        if any(bucket.state is not BucketState.FILLING for bucket in self.layout.buckets) or self.inbox.has_let_go:
            return
        for shard in narrow:
            shard.widen()
        arrived = self.inbox.put_aside()  # should memory be refused, step() brings them again
        self.layout.outdate()
        try:
            self.layout.attach_waiting()
        except BaseException:
            self.inbox.forget_order()  # of arrivals that come again
            raise
        self.inbox.put_back(arrived)

    def arrive(self, shard: Shard, gradient: Tensor, *, in_backward: bool = True, more_to_come: bool = False) -> None:
        """``gradient`` (contiguous, in the shard's order, ``shard.gradient_dtype``) is final; it is read until packed.

        ``more_to_come``: it is not, and the rest will be given to ``add()``; what it is part of is not speculated.
        """
        if more_to_come and shard.index not in self.inbox.arrived:
            self.inbox.expect_more([shard.index])
        elif in_backward:
            self.executor.stopwatch.gradient()
        self.arrive_together([(shard, gradient)], in_backward=in_backward)

    def arrive_together(self, arrivals: Sequence[tuple[Shard, Tensor]], *, in_backward: bool) -> None:
        """Several final gradients, in the order in which they came."""
        if self.link.in_streams:
            self.link.check_stream()
        if self.layout.lacks_buckets:
            self.layout.attach_waiting()
        if self.tail.undelivered or self.tail.unsettled:
            for shard, _ in arrivals:
                self.tail.finish(shard)
        for bucket in self.inbox.take(arrivals, in_backward=in_backward):
            self._pack(bucket, in_backward=in_backward)

    def add(self, shard: Shard, addend: Tensor, *, more_to_come: bool) -> None:
        """``addend`` (as for ``arrive()``) belongs to a gradient of this step that was packed and let go.

        It is added where that is, in host memory. Where this raises, nothing was added.
        """
        if self.link.in_streams:
            self.link.check_stream()
        if not more_to_come:
            self.executor.stopwatch.gradient()
        places = self.layout.places_of(shard)
        with self.executor.caller_at_work():
            ours = addend.to("cpu")  # in the order of the current stream, which has computed it
            for bucket, _ in places:
                if bucket.state is BucketState.SPECULATED:
                    # It was taken for whole, and was not: most likely the rest of this backward is for its others too.
                    self.inbox.expect_more(piece.shard.index for piece in bucket.stepped_pieces())
                    self.speculator.undo(bucket)
            self._abandon_what_is_lost()
            self.executor.raise_failure()
            for bucket, _ in places:
                self._await_earlier_part(bucket)
            self.packer.add(places, ours)
            self.speculator.is_added_to([bucket for bucket, _ in places])
        if more_to_come:
            self.inbox.expect_more([shard.index])
            return
        self.inbox.expect_no_more(shard)
        for bucket, _ in places:
            if bucket.state is BucketState.READY and bucket.missing == 0:
                self.speculator.consider(bucket)

    def _pack(self, bucket: Bucket, *, in_backward: bool) -> None:
        self._await_earlier_part(bucket)
        self.packer.pack(bucket)
        self.speculator.is_packed(bucket, in_backward=in_backward)

    def _await_earlier_part(self, bucket: Bucket) -> None:
        if bucket.arrival is None:
            return
        try:
            self.packer.await_earlier_part(bucket, bucket.arrival)
        except DeviceError:
            self.tail.finish()  # what the step before has left is not of this one, and fails by itself
            self._abandon_step()
            self.executor.take_failure()
            raise

    def retract(self, shard: Shard) -> None:
        """The gradient of ``shard`` was not final after all, or is gone: undo what was done with it."""
        if shard.index not in self.inbox.arrived:
            return
        self.inbox.remove(shard)
        if not self.inbox.arrived:
            self.executor.forget_hypers()
        for bucket, place in self.layout.places_of(shard):
            self.speculator.undo(bucket)
            self.inbox.unpack(bucket)
            bucket.take_out(place)
            self.speculator.norm.forget(bucket)
        if not self.inbox.arrived:
            self.link.step_ended(whole=False)  # no other call will end it, unless gradients come again
        self._abandon_what_is_lost()
        self.executor.raise_failure()

    def restore(self, shard: Shard) -> None:
        """Undoes what was speculated on ``shard``; its gradient stays where it is. Before its master is written."""
        self.tail.finish(shard)
        for bucket in self.layout.buckets_of(shard):
            self.speculator.undo(bucket)
        self._abandon_what_is_lost()
        self.executor.raise_failure()

    def quiesce(self) -> None:
        """Masters and moments as after the last finished step; gradients that were packed stay packed."""
        self.tail.finish()
        for bucket in self.layout.buckets:
            self.speculator.undo(bucket)
        self._abandon_what_is_lost()
        self._raise_failure()

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
        if self.link.in_streams:
            self.link.check_stream()
        deciding, held_up = self._clock(), self.executor.stopwatch.held_up_so_far
        self.tail.finish()
        self._recorder.deciding()
        for bucket in self.layout.buckets:
            if bucket.state is BucketState.FILLING and any(bucket.present):
                self._pack(bucket, in_backward=False)
        with self.executor.caller_at_work():
            self.packer.await_arrivals()
            if self.executor.failure is not None:
                self._abandon_step()
                self.executor.raise_failure()
            arrived = self.inbox.shards()
            sums = dict(zip([shard.index for shard in arrived], sums_of_squares(arrived), strict=True))
        computed = self.executor.stopwatch.computed(deciding, held_up)
        if computed is not None:
            self.schedule.computed(*computed)
        if exchange is None:
            return decide(sums.values(), unscale=unscale, max_grad_norm=max_grad_norm)
        with self.executor.caller_at_work():
            exchange.start(sums)
            for bucket in self.layout.buckets:  # the tail of the pipeline runs while the sums travel
                if bucket.state is BucketState.SPECULATED and not self.link.asynchronous:
                    self.speculator.end(bucket)
            of_all_ranks = exchange.finish()
        if of_all_ranks is None:
            return None
        self._shared = True
        return decide(of_all_ranks, unscale=unscale, max_grad_norm=max_grad_norm)

    def settle_speculation(self) -> None:
        """Waits for what was speculated. WorkerError: a worker failed, the step was abandoned, nothing has changed.

        For callers who tell other ranks before any of them acts on the verdict.
        """
        with self.executor.caller_at_work():
            self._end_all_speculation()

    def apply(self, verdict: Verdict, *, later: bool = False) -> None:
        """Commit, replay or step every bucket that has gradients, and deliver; or skip the step on found_inf.

        ``later``: buckets may still be stepped when this returns, and ``land()`` delivers them; their gradients must
        stay where they are until then.

        WorkerError: a worker failed. During speculation: the step was abandoned, nothing has changed. After the
        verdict, or where other ranks share it: the step was completed all the same, then the error is raised.
        """
        if any(bucket.state is BucketState.FILLING and any(bucket.present) for bucket in self.layout.buckets):
            raise StateError("apply(): gradients arrived since decide(); the verdict does not know them")
        with self.executor.caller_at_work():
            self.executor.forget_hypers()  # they may have changed since they were speculated with
            self.schedule.observe(verdict)
            self._recorder.decided(verdict)
            self.speculator.withdraw()
            if verdict.found_inf:
                self._stats.add(skipped_steps=1, buckets_skipped=self._take_back(BucketState.SKIPPED))
            else:
                self._end_all_speculation()
                self._move_on(verdict, later=later and self.layout.observed)  # else buckets make way for others
            self._end_step(whole=True)
            self._raise_failure()

    def _move_on(self, verdict: Verdict, *, later: bool) -> None:
        """Every bucket that has gradients gets its fate, and parameters their new values, now or later."""
        moving = [bucket for bucket in reversed(self.layout.buckets) if bucket.state is not BucketState.FILLING]
        on_host = [bucket for bucket in moving if not bucket.resident]
        self.finisher.choose_two_phases(on_host, on_demand=later)
        resident = [bucket for bucket in moving if bucket.resident]
        try:
            self.finisher.step_resident(resident, verdict.gradient_factor, shared=self._shared)
        except DeviceError:
            self._abandon_step()
            raise
        for bucket in on_host:
            self.finisher.finish(bucket, verdict.gradient_factor)
        self.tail.leave(on_host)
        for shard in self.inbox.shards():
            shard.stepped()
        self._stats.add(steps=1, clipped_steps=verdict.clip_coefficient < 1.0)
        self.speculator.count_journals()
        if not later:
            self.tail.deliver(on_host)
        elif self.link.asynchronous:
            self.tail.send_up(on_host)

    def _end_all_speculation(self) -> None:
        """Every speculated bucket done; if a worker failed, the whole step is abandoned before anything shows.

        Not when other ranks act on the same verdict: they cannot take the step back any more, so it is completed here
        too, from the buckets as they were, and the error is raised with the step done.
        """
        self.speculator.end_all()
        if self.executor.failure is not None and not self._shared:
            self._abandon_step()
            self.executor.raise_failure()

    def abandon(self) -> None:
        """Ends the step with nothing changed: the user never called ``step()``."""
        if not self.inbox.arrived:
            return
        self.tail.finish()
        with self.executor.caller_at_work():
            self._abandon_step()
            self._raise_failure()

    def _abandon_step(self) -> None:
        """Ends it with nothing changed. What had failed is the caller's to raise."""
        self._stats.add(buckets_abandoned=self._take_back(BucketState.ABANDONED))
        self._end_step(whole=False)

    def _abandon_what_is_lost(self) -> None:
        """A packed gradient that never reached host memory cannot be had again: its step ends with nothing changed."""
        lost = self.packer.lost()
        if lost is None:
            return
        failure = self.executor.take_failure() or DeviceError(lost)
        self.tail.finish()  # what the step before has left is not of this one, and fails by itself
        self.executor.fail(failure)
        self._abandon_step()

    def _take_back(self, state: BucketState) -> int:
        """Undoes every speculated bucket and ends the step of all with ``state``; returns how many were undone."""
        undone = self.speculator.undo_all()
        for bucket in self.layout.buckets:
            if bucket.state is not BucketState.FILLING:
                self.executor.wait(bucket)
                bucket.move(state)
        return undone

    def _end_step(self, *, whole: bool) -> None:
        """Every part forgets this step. ``whole``: backward ended, so that the order of its gradients is known."""
        self._recorder.end_step(self.layout.buckets)
        for bucket in self.layout.buckets:
            if not self.tail.holds(bucket):
                bucket.renew()
        self.executor.stopwatch.step_ended()
        self.executor.forget_hypers()
        order = self.inbox.end_step()
        self.speculator.end_step()
        self.link.step_ended(whole=whole)
        self._shared = False
        if whole and not self.layout.observed and order:
            self.layout.follow_observed_order(order)
        elif whole and self.layout.observed and self.layout.placer is not None and self.layout.placer.is_due():
            self._place_by_measurement(self.layout.placer)

    def _place_by_measurement(self, placer: Placer) -> None:
        """placement="auto", once: after some steps it is known what the processors cannot hide."""
        measured = self.layout.measured()
        if measured is None:
            placer.wait_longer()
            return
        self.tail.land()
        self.tail.settle()
        self.layout.place_by(measured)

    def _raise_failure(self) -> None:
        """What failed in this step, or else in the one before."""
        failure = self.executor.take_failure() or self.tail.take_failure()
        if failure is not None:
            raise failure

    # ---- the end ----------------------------------------------------------------------------------------------

    def digests(self) -> dict[str, str]:
        """SHA-256 over all shards in registration order: masters, moments and published parameters."""
        self.quiesce()
        return digests_of(self.shards)

    def close(self) -> None:
        """Takes back what was speculated and ends the worker threads."""
        try:
            self.tail.finish()
            self.abandon()
            self._raise_failure()
        finally:
            self.end_threads()
