"""The core: speculation over buckets. Works on shards and gradients; knows nothing of autograd or host frameworks.

One step: ``arrive`` for every final gradient (buckets that become complete are packed and, where the policy wants
it, stepped at once by the worker threads), then ``decide`` and ``apply``, or ``abandon``. Until ``apply`` delivers,
nothing outside the core's own masters and moments has changed. The layers below are in superoffload/pipeline.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, overload

import numpy as np
import torch
from torch import Tensor

from superoffload import _native
from superoffload.bits import same_bits
from superoffload.bucket import BLOCK, Bucket, BucketState, GroupHyper, Shard
from superoffload.errors import DeviceError, StateError, TornStep
from superoffload.link import Link, wait_until_ended
from superoffload.pipeline.layout import JOURNAL_BYTES_PER_PARAM
from superoffload.pipeline.options import CoreOptions
from superoffload.pipeline.settling import Settling
from superoffload.placement import Placer
from superoffload.policy import choose_width, learn_from_journal, learn_from_overflow
from superoffload.schedule import Situation
from superoffload.verdict import Verdict, decide

if TYPE_CHECKING:
    from superoffload.checkpoints.snapshot import Snapshot

__all__ = ["JOURNAL_BYTES_PER_PARAM", "Core", "CoreOptions", "SumExchange"]

Operation = _native.Operation

# beta ** step is 0 in double precision from here on, so that 1 - beta ** step, the bias correction, is 1.
_CORRECTED_BY_ONE = 1 << 60


class SumExchange(Protocol):
    """Sums of squares of every rank; ``start`` and ``finish`` are called once per step."""

    def start(self, sums: Mapping[int, float]) -> None:
        """Those of this rank's shards, by index, in registration order."""

    def finish(self) -> Sequence[float] | None:
        """Those of all ranks, the same on each, in the order to fold them; None if no rank has a gradient."""


class Core(Settling):
    """The step. ``hyper_of(group)`` returns a group's current hyper-parameters."""

    def __init__(self, link: Link, options: CoreOptions, hyper_of: Callable[[int], GroupHyper]) -> None:
        super().__init__(link, options, hyper_of)
        self._incoming: dict[int, Tensor | None] = {}  # None: packed, and let go
        self.packed: Callable[[Shard], None] = _nobody  # told when the link needs a shard's gradient no more
        self._speculating = True  # for this step: no early stop so far
        self._partial = 0.0  # sum of squares of what has arrived in this step, as far as it was looked at
        self._unsummed: dict[Bucket, _native.Completion] = {}  # packed in this step, not in _partial yet
        self._proves_clip = math.inf
        self._unscale = 1.0
        self._shared = False  # the verdict of this step is also that of other ranks
        self._in_two_phases: set[Bucket] = set()  # chosen for this step
        self._journaled_numel = 0
        self._journaled_bytes = 0
        self.snapshot: Snapshot | None = None  # state of an earlier moment that is still being read

    # ---- during backward --------------------------------------------------------------------------------------

    def expect(self, *, unscale: float, max_grad_norm: float | None) -> None:
        """What the coming verdict will most likely use; speculation is right when it does."""
        self._unscale = unscale
        self._proves_clip = math.inf
        if max_grad_norm is not None and unscale != 0.0:
            norm = max_grad_norm / abs(unscale)
            self._proves_clip = norm * norm * (1 + 1e-6)  # not norm ** 2, which raises where this gives infinity

    def has_gradient(self, shard: Shard) -> bool:
        """Whether a gradient of ``shard`` has arrived in this step."""
        return shard.index in self._incoming

    @property
    def is_filling(self) -> bool:
        """Whether any gradient has arrived in this step."""
        return bool(self._incoming)

    def arrive(self, shard: Shard, gradient: Tensor, *, in_backward: bool = True) -> None:
        """``gradient`` (flat, contiguous, ``shard.gradient_dtype``) is final; its memory is read until packed."""
        if shard.index in self._incoming:
            raise StateError(f"{shard.name}: a second gradient arrived without retract() in between")
        self.link.check_stream()
        self._attach_waiting()
        if in_backward:
            self._stopwatch.gradient()
        self._finish_before(shard)
        self._incoming[shard.index] = gradient
        if not self._observed and in_backward:
            self._order.append(shard.index)
        places = self._places.get(shard.index, ())
        for bucket, place in places:  # first of all, so that an error further down leaves nothing half-known
            if bucket.state is BucketState.READY:  # packed by a decide() that came before this gradient
                bucket.move(BucketState.FILLING)
            bucket.present[place] = True
            bucket.missing -= 1
            self.link.received(bucket)
        for bucket, _ in places:
            if bucket.missing == 0:
                self._pack(bucket)
                if in_backward and self._worth_speculating():
                    self._speculate(bucket)

    def gradient_is(self, shard: Shard, gradient: Tensor) -> bool:
        """Whether the gradient that arrived has the bits of ``gradient``."""
        arrived = self._incoming[shard.index]
        for bucket, place in self._places.get(shard.index, ()):
            piece = bucket.pieces[place]
            theirs = gradient[piece.start : piece.start + piece.numel]
            if arrived is None or bucket.state is not BucketState.FILLING:
                # What arrived may have been overwritten since it was packed, or is gone.
                if bucket.arrival is not None:
                    wait_until_ended(bucket.arrival)  # if it was lost, decide() says so
                ours = bucket.gradient[piece.offset : piece.offset + piece.numel]
            else:
                ours = arrived[piece.start : piece.start + piece.numel]
            if not same_bits(
                ours.to("cpu"), theirs.to("cpu", ours.dtype)
            ):  # packed in host memory, perhaps in a wider format
                return False
        return True

    def retract(self, shard: Shard) -> None:
        """The gradient of ``shard`` was not final after all, or is gone: undo what was done with it."""
        if shard.index not in self._incoming:
            return
        del self._incoming[shard.index]
        if not self._observed and shard.index in self._order:
            self._order.remove(shard.index)
        for bucket, place in self._places.get(shard.index, ()):
            self._undo_one(bucket)
            if bucket.state is BucketState.READY:
                bucket.move(BucketState.FILLING)
            bucket.present[place] = False
            bucket.missing += 1
            bucket.squares = 0.0
            self._unsummed.pop(bucket, None)
        self._partial = sum(bucket.squares for bucket in self.buckets)
        self._abandon_what_is_lost()
        self._raise_worker_failure()

    def restore(self, shard: Shard) -> None:
        """Undoes what was speculated on ``shard``; its gradient stays where it is. Before its master is written."""
        self._finish_before(shard)
        for bucket in self._buckets_of(shard):
            self._undo_one(bucket)
        self._abandon_what_is_lost()
        self._raise_worker_failure()

    def _abandon_what_is_lost(self) -> None:
        """A packed gradient that never reached host memory cannot be had again: its step ends with nothing changed."""
        if any(
            bucket.arrival is not None and bucket.arrival.error and self._counts_on(bucket) for bucket in self.buckets
        ):
            self._stats.buckets_abandoned += self._take_back(BucketState.ABANDONED)
            self._end_step(whole=False)

    def _pack(self, bucket: Bucket) -> None:
        self._keep_what_was_packed(bucket)
        grads = [
            self._incoming[piece.shard.index] if present else None
            for piece, present in zip(bucket.pieces, bucket.present, strict=True)
        ]
        with self._caller_at_work():
            ticket = self.link.pack(bucket, grads)
        bucket.arrival = bucket.running = self.link.arrived(ticket)
        bucket.move(BucketState.READY)
        self._unsummed[bucket] = bucket.running
        self._stopwatch.packed(bucket.running)
        if self.link.frees_gradients:
            self._let_go_of(bucket)

    def _keep_what_was_packed(self, bucket: Bucket) -> None:
        """Gradients that were let go, of a bucket that is packed again: their part of the packed one must have come."""
        if bucket.arrival is None or not self._counts_on(bucket):
            return
        try:
            with self._caller_at_work():
                bucket.arrival.wait()
        except RuntimeError as error:
            self._stats.buckets_abandoned += self._take_back(BucketState.ABANDONED)
            self._end_step(whole=False)
            self._failure = None
            raise DeviceError(str(error)) from error

    def _counts_on(self, bucket: Bucket) -> bool:
        """Whether (part of) the packed gradient of ``bucket`` is all that there is of some gradient of this step."""
        if bucket.state is BucketState.READY:
            return True
        pieces = zip(bucket.pieces, bucket.present, strict=True)
        return bucket.state is BucketState.FILLING and any(
            present and self._incoming[piece.shard.index] is None for piece, present in pieces
        )

    def _let_go_of(self, bucket: Bucket) -> None:
        """Gradients of which every part was packed: nobody reads them again, so their memory may go."""
        for piece, present in zip(bucket.pieces, bucket.present, strict=True):
            shard = piece.shard
            filling = (other.state is BucketState.FILLING for other, _ in self._places[shard.index])
            if present and self._incoming[shard.index] is not None and not any(filling):
                self._incoming[shard.index] = None
                self.packed(shard)

    def _sum_what_arrived(self) -> None:
        """For the early stop: the block sums of packed gradients that have reached host memory since the last look."""
        for bucket, arrival in list(self._unsummed.items()):
            if not arrival.done() or arrival.error:
                continue
            del self._unsummed[bucket]
            for piece, present in zip(bucket.pieces, bucket.present, strict=True):
                if present:
                    first = piece.start // BLOCK
                    sums = piece.shard.block_sums[first : first + -(-piece.numel // BLOCK)]
                    bucket.squares += float(np.sum(sums))
            self._partial += bucket.squares

    def _worth_speculating(self) -> bool:
        if self._speculating:
            self._sum_what_arrived()
            # Early stop: a non-finite gradient, or the part of the norm that is known already proves a clip.
            self._speculating = self._partial < self._proves_clip
            if not self._speculating:
                self._withdraw()
        return self._speculating and self.policy.wants(self._packed_share())

    def _packed_share(self) -> float:
        in_this_step = (BucketState.READY, BucketState.SPECULATED)
        packed = sum(bucket.numel for bucket in self.buckets if bucket.state in in_this_step)
        return packed / sum(bucket.numel for bucket in self.buckets)

    def _freeze(self, bucket: Bucket, factor: float) -> None:
        hyper = self._hyper_of(bucket.group)
        ahead = 1 if hyper.bias_correction else _CORRECTED_BY_ONE
        steps = [
            piece.shard.steps + ahead if present else 0
            for piece, present in zip(bucket.pieces, bucket.present, strict=True)
        ]
        work = bucket.work if bucket.resident_work is None else bucket.resident_work
        work.freeze(
            lr=hyper.lr,
            beta1=hyper.beta1,
            beta2=hyper.beta2,
            eps=hyper.eps,
            weight_decay=hyper.weight_decay,
            gradient_factor=factor,
            l2=hyper.l2,
            steps=steps,
        )
        bucket.frozen = hyper
        bucket.factor = factor

    def _next_step_of(self, bucket: Bucket) -> int:
        return 1 + min(p.shard.steps for p, present in zip(bucket.pieces, bucket.present, strict=True) if present)

    def protect(self, shards: Iterable[Shard]) -> None:
        """Before masters or moments change: whoever reads an earlier state has them, or a copy, when it returns."""
        if self.snapshot is not None:
            self.snapshot.protect(shards)
            if self.snapshot.over:
                self.snapshot = None

    def _speculate(self, bucket: Bucket) -> None:
        if bucket.resident:  # stepped on the accelerator, after the verdict
            return
        width = choose_width(bucket, self._next_step_of(bucket))
        if width is None:
            return
        self.protect(piece.shard for piece in bucket.pieces)
        bucket.width = width
        self._freeze(bucket, self._unscale)
        self._submit(bucket, Operation.step_journaled, width)
        bucket.move(BucketState.SPECULATED)
        self._stats.buckets_speculated += 1

    # ---- what becomes of what was speculated -------------------------------------------------------------------------

    def _withdraw(self) -> None:
        """Takes back what waits for a worker: it is not worth a journal any more. Not on the host, where the model
        computes with the same processors, so that little waits when a verdict comes."""
        if not self.link.asynchronous:
            return
        for bucket in reversed(self.buckets):
            running = bucket.running
            if bucket.state is BucketState.SPECULATED and running is not None and self.pool.withdraw(running):
                bucket.running, bucket.doing = bucket.arrival, None
                self._mark_undone(bucket)

    def _end_speculation(self, bucket: Bucket) -> None:
        """Waits for a speculated step; one whose journal overflowed or that failed was undone by the workers."""
        if not self._wait(bucket):
            self._mark_undone(bucket)
        elif bucket.work.overflowed:
            self._stats.journal_overflows += 1
            learn_from_overflow(bucket, bucket.width, self._next_step_of(bucket))
            self._mark_undone(bucket)

    def _mark_undone(self, bucket: Bucket) -> None:
        bucket.move(BucketState.UNDONE)
        self._stats.buckets_undone += 1
        bucket.move(BucketState.FILLING)
        bucket.move(BucketState.READY)

    def _undo_one(self, bucket: Bucket) -> None:
        """A speculated bucket becomes ready again, its packed gradient untouched."""
        if bucket.state is not BucketState.SPECULATED:
            return
        self._end_speculation(bucket)
        if bucket.state is BucketState.SPECULATED:
            self._submit(bucket, Operation.undo)
            self._wait(bucket)
            self._mark_undone(bucket)

    def quiesce(self) -> None:
        """Masters and moments as after the last finished step; gradients that were packed stay packed."""
        self._finish_before()
        for bucket in self.buckets:
            self._undo_one(bucket)
        self._abandon_what_is_lost()
        self._raise_failure()

    def _take_back(self, state: BucketState) -> int:
        """Undoes every speculated bucket and ends the step of all with ``state``; returns how many were undone."""
        undone = []
        for bucket in self.buckets:
            if bucket.state is BucketState.SPECULATED:
                self._end_speculation(bucket)
            if bucket.state is BucketState.SPECULATED:
                self._submit(bucket, Operation.undo)
                undone.append(bucket)
        for bucket in undone:
            self._wait(bucket)
        for bucket in self.buckets:
            if bucket.state is not BucketState.FILLING:
                self._wait(bucket)
                bucket.move(state)
        return len(undone)

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

    def _wait_for_arrivals(self) -> None:
        """For the packed gradients, and with them the sums. If one is lost, the step is abandoned."""
        for bucket in self.buckets:
            if bucket.state is BucketState.READY:
                self._wait(bucket)
            elif bucket.state is BucketState.SPECULATED and bucket.arrival is not None:
                try:
                    bucket.arrival.wait()
                except RuntimeError as error:
                    self._failure = self._failure or DeviceError(str(error))
        if self._failure is not None:
            self._stats.buckets_abandoned += self._take_back(BucketState.ABANDONED)
            self._end_step(whole=False)
            self._raise_failure()

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
            self._stats.buckets_abandoned += self._take_back(BucketState.ABANDONED)
            self._end_step(whole=False)
            self._raise_failure()

    def _finish(self, bucket: Bucket, factor: float) -> None:
        if bucket.state is BucketState.SPECULATED and bucket.frozen != self._hyper_of(bucket.group):
            self._undo_one(bucket)  # lr, betas, eps or weight_decay changed after speculation
        if bucket.state is BucketState.SPECULATED:
            if _same_bits(bucket.factor, factor):
                bucket.move(BucketState.COMMITTED)
                self._stats.buckets_committed += 1
                return
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
                self._stats.buckets_abandoned += self._take_back(BucketState.ABANDONED)
                self._end_step(whole=False)
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
            self._stats.buckets_abandoned += self._take_back(BucketState.ABANDONED)
            self._end_step(whole=False)
            self._raise_failure()

    def _end_step(self, *, whole: bool) -> None:
        """``whole``: backward ended, so that the order of its gradients is known."""
        if self.timeline is not None:
            self.timeline.end_step(self.buckets)
        for bucket in self.buckets:
            if bucket not in self._landing and bucket.state is not BucketState.PUBLISHED:
                bucket.renew()
        self._stopwatch.step_ended()
        self._incoming.clear()
        self._partial = 0.0
        self._unsummed.clear()
        self._speculating = True
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


def _nobody(shard: Shard) -> None:
    """Where gradients are kept, nobody need know that they were packed."""


def _same_bits(factor: float, other: float) -> bool:
    """As the kernels round them; of the two zeros each is only itself."""
    with np.errstate(over="ignore", under="ignore"):
        return bool(np.float32(factor).tobytes() == np.float32(other).tobytes())
