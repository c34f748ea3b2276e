"""The engine makes one step over buckets. It knows shards and gradients, but no autograd and no host framework.

One step is ``arrive`` for every final gradient, then ``decide`` and ``apply``, or ``abandon``. Buckets that become
complete are packed and, where the schedule wants it, stepped at once by the worker threads. Until ``apply`` delivers,
nothing outside the engine's own masters and moments has changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import overload

import torch
from torch import Tensor

from superoffload.engine.after_verdict import Finisher, LastStep
from superoffload.engine.bucket import Bucket, BucketState, GroupHyper, Shard, sums_of_squares
from superoffload.engine.executor import Executor
from superoffload.engine.inbox import Inbox, Packer
from superoffload.engine.layout import Layout
from superoffload.engine.moments import read_exp_avg, read_exp_avg_sq
from superoffload.engine.options import EngineOptions, Listener, Pool, Recorder
from superoffload.engine.placement import Placer
from superoffload.engine.snapshot import Snapshots
from superoffload.engine.speculator import Speculator
from superoffload.engine.stats import Stats
from superoffload.engine.verdict import SumExchange, Verdict, decide
from superoffload.errors import DeviceError, StateError
from superoffload.links.base import Link


class Engine:
    """Coordinates the parts during a step; each part owns its data.

    ``hyper_of(group)`` returns a group's current hyper-parameters. ``listener`` is told of events, ``recorder`` records
    the steps, and ``placer`` chooses which state is on the accelerator (None: none).
    """

    def __init__(
        self,
        link: Link,
        options: EngineOptions,
        hyper_of: Callable[[int], GroupHyper],
        *,
        listener: Listener | None = None,
        recorder: Recorder | None = None,
        placer: Placer | None = None,
    ) -> None:
        listener, recorder = listener or Listener(), recorder or Recorder()
        link = recorder.wrap_link(link)
        self.link = link
        self.schedule = schedule = options.make_schedule()
        self.snapshots = Snapshots()
        self._recorder = recorder
        self._clock = options.clock
        self._stats = stats = Stats()
        pool = recorder.wrap_pool(options.make_pool())
        self.executor = Executor(link, pool, schedule, hyper_of, options.clock)
        self.layout = Layout(link, options, schedule, listener, placer, self.snapshots.protect)
        self.last_step = LastStep(link, self.layout, self.executor, schedule, listener, recorder)
        self.inbox = Inbox(link, self.layout)
        self.packer = Packer(link, self.layout, self.inbox, self.executor, listener)
        self.speculator = Speculator(link, self.layout, self.inbox, self.executor, schedule, self.snapshots, stats)
        self.finisher = Finisher(
            link, self.layout, self.speculator, self.executor, schedule, self.snapshots, stats, options.two_phase
        )
        self._incomplete: set[Bucket] = set()  # packed although gradients are missing: backward has passed them
        self._shared = False  # other ranks act on the same verdict in this step
        recorder.follow(lambda: self.layout.buckets)

    @property
    def shards(self) -> list[Shard]:
        """Returns all shards in registration order."""
        return self.layout.shards

    @property
    def buckets(self) -> list[Bucket]:
        """Returns all buckets in the order in which backward completes them."""
        return self.layout.buckets

    @property
    def pool(self) -> Pool:
        """Returns the pool of worker threads."""
        return self.executor.pool

    # ---- gradients --------------------------------------------------------------------------------------------

    def has_gradient(self, shard: Shard) -> bool:
        """Returns whether a gradient of ``shard`` has arrived in this step."""
        return shard.index in self.inbox.arrived

    @property
    def is_filling(self) -> bool:
        """Returns whether any gradient has arrived in this step."""
        return bool(self.inbox.arrived)

    def widen(self, shards: Iterable[Shard]) -> None:
        """Lays buckets out anew with fp32 gradients for these shards, unless a bucket was packed in this step."""
        narrow = [shard for shard in shards if shard.gradient_dtype != torch.float32]
        if not narrow:
            return
        self.last_step.finish()
        if any(bucket.state is not BucketState.FILLING for bucket in self.layout.buckets) or self.inbox.has_released:
            return
        for shard in narrow:
            shard.gradient_dtype = torch.float32
        arrived = self.inbox.put_aside()  # if memory is refused, step() hands them over again
        self.layout.outdate()
        try:
            self.layout.attach_waiting()
        except BaseException:
            self.inbox.forget_order()  # the gradients will arrive again
            raise
        self.inbox.put_back(arrived)

    def arrive(self, shard: Shard, gradient: Tensor, *, in_backward: bool = True, more_to_come: bool = False) -> None:
        """Takes a final gradient: contiguous, in the shard's order, of ``shard.gradient_dtype``; read until packed.

        ``more_to_come``: it is not final; ``add()`` gets the rest, and until then its buckets are not speculated.
        """
        if more_to_come and shard.index not in self.inbox.arrived:
            self.inbox.unfinished.add(shard.index)
        elif in_backward:
            self.executor.stopwatch.gradient()
        self.arrive_together([(shard, gradient)], in_backward=in_backward)

    def arrive_together(self, arrivals: Sequence[tuple[Shard, Tensor]], *, in_backward: bool) -> None:
        """Takes several final gradients in the order in which they arrived."""
        self.link.check_stream()
        if self.layout.lacks_buckets:
            self.layout.attach_waiting()
        if self.last_step.undelivered or self.last_step.unsettled:
            for shard, _ in arrivals:
                self.last_step.finish(shard)
        if self._incomplete:
            self._reopen(arrivals)
        for bucket in self.inbox.take(arrivals, in_backward=in_backward):
            self._pack(bucket, in_backward=in_backward)

    def pass_by(self, bucket: Bucket) -> None:
        """Packs ``bucket`` with the gradients that it has: backward has passed it, so that no more are expected."""
        if bucket.state is BucketState.FILLING and any(bucket.present):
            self._incomplete.add(bucket)
            self._pack(bucket, in_backward=True)

    def _reopen(self, arrivals: Iterable[tuple[Shard, Tensor]]) -> None:
        """Takes back that backward had passed the buckets of these gradients."""
        for shard, _ in arrivals:
            for bucket in self._incomplete.intersection(self.layout.buckets_of(shard)):
                self._incomplete.discard(bucket)
                self.speculator.undo(bucket)
                self.speculator.norm.forget(bucket)
                bucket.waits_for_all = True
        self._abandon_what_is_lost()
        self.executor.raise_failure()

    def add(self, shard: Shard, addend: Tensor, *, more_to_come: bool) -> None:
        """Adds ``addend`` (as for ``arrive()``), in host memory, to a gradient of this step that was packed and freed.

        Where this raises, nothing was added.
        """
        self.link.check_stream()
        if not more_to_come:
            self.executor.stopwatch.gradient()
        places = self.layout.places_of(shard)
        with self.executor.caller_at_work():
            ours = addend.to("cpu")  # on the current stream, which has computed it
            for bucket, _ in places:
                if bucket.state is BucketState.SPECULATED:
                    # The bucket's gradients were not whole. More will most likely be added to its other shards too.
                    self.inbox.unfinished.update(piece.shard.index for piece in bucket.stepped_pieces())
                    self.speculator.undo(bucket)
            self._abandon_what_is_lost()
            self.executor.raise_failure()
            for bucket, _ in places:
                self._await_earlier_part(bucket)
            self.packer.add(places, ours)
            self.speculator.count_anew([bucket for bucket, _ in places])
        if more_to_come:
            self.inbox.unfinished.add(shard.index)
            return
        self.inbox.unfinished.discard(shard.index)
        for bucket, _ in places:
            if bucket.state is BucketState.READY and bucket.missing == 0:
                self.speculator.consider(bucket)

    def _pack(self, bucket: Bucket, *, in_backward: bool) -> None:
        self._await_earlier_part(bucket)
        self.packer.pack(bucket)
        self.speculator.take_packed(bucket, in_backward=in_backward)

    def _await_earlier_part(self, bucket: Bucket) -> None:
        if bucket.arrival is None:
            return
        try:
            self.packer.await_earlier_part(bucket, bucket.arrival)
        except DeviceError:
            self.last_step.finish()  # the step before reports its failures itself
            self._abandon_step()
            self.executor.take_failure()
            raise

    def retract(self, shard: Shard) -> None:
        """Takes the gradient of ``shard`` back, because it was not final or is gone, and undoes its speculation."""
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
        """Undoes speculation on ``shard`` before its master is written; its packed gradient stays."""
        self.last_step.finish(shard)
        for bucket in self.layout.buckets_of(shard):
            self.speculator.undo(bucket)
        self._abandon_what_is_lost()
        self.executor.raise_failure()

    def reveal(self, shard: Shard) -> None:
        """Brings the state of ``shard`` to the end of the last finished step, since a program reads or writes it.
        Failures wait for the end of the step."""
        self.last_step.settle(shard)
        for bucket in self.layout.buckets_of(shard):
            self.speculator.undo(bucket)
        self.snapshots.protect([shard])

    def quiesce(self) -> None:
        """Brings masters and moments to the end of the last finished step; packed gradients stay packed."""
        self.last_step.finish()
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
        """Packs the gradients that are not packed yet and folds the verdict from all that arrived.

        With ``exchange`` it folds those of all ranks, and returns None if no rank has any.
        """
        self.link.check_stream()
        deciding, held_up = self._clock(), self.executor.stopwatch.held_up_so_far
        self.last_step.finish()
        self._recorder.deciding()
        for bucket in self.layout.buckets:
            if bucket.state is BucketState.FILLING and any(bucket.present):
                self._pack(bucket, in_backward=False)
        if self.link.asynchronous:  # until the last gradient arrives, the device is in backward: nothing is exposed
            self.schedule.prepare()
            self.packer.await_arrivals()
        with self.executor.caller_at_work():
            self.packer.await_arrivals()
            if self.executor.failure is not None:
                self._abandon_step()
                self.executor.raise_failure()
            arrived = self.inbox.shards()
            sums = dict(zip([shard.index for shard in arrived], sums_of_squares(arrived), strict=True))
        computed = self.executor.stopwatch.computed(deciding, held_up)
        if computed is not None:
            self.schedule.times.computed(*computed)
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

    def await_speculation(self) -> None:
        """Waits for speculated buckets; raises WorkerError if a worker failed: the step was abandoned, unchanged.

        A caller with other ranks tells them of the failure before any rank acts on the verdict.
        """
        with self.executor.caller_at_work():
            self._end_all_speculation()

    def apply(self, verdict: Verdict, *, later: bool = False) -> None:
        """Commits, replays or steps every bucket that has gradients, and delivers; or skips the step on found_inf.

        ``later``: buckets may still be stepped when this returns, and ``last_step.land()`` delivers them. Until then
        their gradients must stay where they are.

        Raises WorkerError if a worker failed. If it failed during speculation, the step was abandoned and nothing has
        changed. If it failed after the verdict, or other ranks share the verdict, the step was completed.
        """
        if any(bucket.state is BucketState.FILLING and any(bucket.present) for bucket in self.layout.buckets):
            raise StateError("apply(): gradients arrived since decide(); the verdict does not know them")
        with self.executor.caller_at_work():
            self.executor.forget_hypers()  # they may have changed since speculation
            self.schedule.observe(verdict)
            self._recorder.decided(verdict)
            self.speculator.withdraw()
            for shard in self.shards:  # a program that holds the master may have written it
                shard.apart = shard.apart or (bool(shard.windows) and shard.is_held)
            if verdict.found_inf:
                self._stats.add(skipped_steps=1, buckets_skipped=self._take_back(BucketState.SKIPPED))
            else:
                self._end_all_speculation()
                self._move_on(verdict, later=later and self.layout.observed)  # else new buckets may replace these
            self._end_step(whole=True)
            self._raise_failure()

    def _move_on(self, verdict: Verdict, *, later: bool) -> None:
        """Ends the step of every bucket with gradients, and delivers parameters now or later."""
        moving = [bucket for bucket in self.layout.buckets[::-1] if bucket.state is not BucketState.FILLING]
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
        self.last_step.take(on_host)
        for shard in self.inbox.shards():
            shard.steps, shard.apart = shard.steps + 1, False
        self._stats.add(steps=1, clipped_steps=verdict.clip_coefficient < 1.0)
        self.speculator.count_journals()
        for bucket in on_host if later else ():
            if bucket.held is not None:  # a program may read its state as soon as step() has returned
                self.executor.wait(bucket)
        if not later:
            self.last_step.deliver(on_host)
        elif self.link.asynchronous:
            self.last_step.land_staged()
            self.last_step.send_up([bucket for bucket in on_host if bucket in self.last_step.undelivered])

    def _end_all_speculation(self) -> None:
        """Waits for all speculated buckets; if a worker failed, abandons the step before anything is delivered.

        Other ranks that act on the same verdict cannot take the step back. Then this rank completes it too, and raises
        the error afterwards.
        """
        self.speculator.end_all()
        if self.executor.failure is not None and not self._shared:
            self._abandon_step()
            self.executor.raise_failure()

    def abandon(self) -> None:
        """Ends the step with nothing changed, because the user never called ``step()``."""
        if not self.inbox.arrived:
            return
        self.last_step.finish()
        with self.executor.caller_at_work():
            self._abandon_step()
            self._raise_failure()

    def _abandon_step(self) -> None:
        """Ends the step with nothing changed. The caller raises the failure."""
        self._stats.add(buckets_abandoned=self._take_back(BucketState.ABANDONED))
        self._end_step(whole=False)

    def _abandon_what_is_lost(self) -> None:
        """Abandons the step if a packed gradient that it needs never reached host memory."""
        lost = self.packer.lost()
        if lost is None:
            return
        failure = self.executor.take_failure() or DeviceError(lost)
        self.last_step.finish()  # the step before reports its failures itself
        self.executor.fail(failure)
        self._abandon_step()

    def _take_back(self, state: BucketState) -> int:
        """Undoes every speculated bucket and ends all buckets with ``state``; returns how many were undone."""
        undone = self.speculator.undo_all()
        for bucket in self.layout.buckets:
            if bucket.state is not BucketState.FILLING:
                self.executor.wait(bucket)
                bucket.move(state)
        return undone

    def _end_step(self, *, whole: bool) -> None:
        """Has every part forget this step. ``whole``: backward ended, so the order of its gradients is known."""
        self._recorder.end_step(self.layout.buckets)
        for bucket in self.layout.buckets:
            if not self.last_step.holds(bucket):
                bucket.renew()
        self.executor.stopwatch.step_ended()
        self.executor.forget_hypers()
        order = self.inbox.end_step()
        self.speculator.end_step()
        self.link.step_ended(whole=whole)
        self._shared = False
        self._incomplete.clear()
        if whole and not self.layout.observed and order:
            self.layout.follow_observed_order(order)
        elif whole and self.layout.observed and self.layout.placer is not None and self.layout.placer.is_due():
            self._place_by_measurement(self.layout.placer)

    def _place_by_measurement(self, placer: Placer) -> None:
        """Chooses the fraction for placement="auto", once some steps have shown what backward cannot hide."""
        measured = self.layout.measured()
        if measured is None:
            placer.wait_longer()
            return
        self.last_step.land()
        self.last_step.settle()
        self.layout.place_by(measured)

    def _raise_failure(self) -> None:
        """Raises the failure of this step, or else of the one before."""
        failure = self.executor.take_failure() or self.last_step.take_failure()
        if failure is not None:
            raise failure

    # ---- sleep, the end -----------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Finishes the last step, then gives back all memory but masters and moments; no gradient has arrived since."""
        self.quiesce()
        self.link.await_copies()
        self.layout.sleep()

    def wake(self) -> None:
        """Takes the memory back; where this raises, nothing has changed."""
        self.layout.wake()

    def close(self) -> None:
        """Undoes speculation and ends the worker threads."""
        try:
            self.last_step.finish()
            self.abandon()
            self._raise_failure()
        finally:
            self.end_threads()

    def end_threads(self) -> None:
        """Ends the worker threads, then those of the link. Afterwards nothing writes to the user's memory."""
        self.executor.close()
        self.link.close()

    def __del__(self) -> None:
        # Workers must end before the tensors that they write to are freed.
        if hasattr(self, "executor"):
            self.end_threads()

    # ---- figures ------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float | int]:
        """Returns totals since construction (superoffload/engine/stats.py)."""
        self._stats.set(
            buckets_speculated=self.speculator.speculated,
            optimizer_seconds=self.executor.pool.busy_seconds,
            optimizer_seconds_exposed=self.executor.exposed_seconds,
            bytes_down=self.link.bytes_down,
            bytes_up=self.link.bytes_up,
            bytes_up_early=self.link.bytes_up_early,
            pinned_bytes=self.link.pinned_bytes,
            host_bytes=self.layout.host_bytes,
            journal_reserved_bytes=self.layout.journal_bytes_held,
            params_on_device=sum(shard.numel for shard in self.shards if shard.resident),
        )
        return self._stats.as_dict()

    def digests(self) -> dict[str, str]:
        """Returns SHA-256 digests of masters, moments and published parameters, over all shards in registration order:
        equal digests mean equal bits."""
        self.quiesce()
        columns: dict[str, Callable[[Shard], Tensor]] = {
            "master": lambda shard: shard.read_masters(),
            "exp_avg": read_exp_avg,
            "exp_avg_sq": read_exp_avg_sq,
            "published": lambda shard: shard.target(),
        }
        result = {}
        for name, column in columns.items():
            digest = hashlib.sha256()
            for shard in self.shards:
                if shard.numel:  # view() refuses the strides of an empty tensor
                    digest.update(column(shard).to("cpu").contiguous().view(torch.uint8).numpy().data)
            result[name] = digest.hexdigest()
        return result
