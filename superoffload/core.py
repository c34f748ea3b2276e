"""The core: speculation over buckets. Works on shards and gradients; knows nothing of autograd or host frameworks.

One step: ``arrive`` for every final gradient (buckets that become complete are packed and, where the policy wants
it, stepped at once by the worker threads), then ``decide`` and ``apply``, or ``abandon``. Until ``apply`` delivers,
nothing outside the core's own masters and moments has changed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, overload

import numpy as np
import torch
from torch import Tensor

from superoffload import _native
from superoffload.bucket import BLOCK, Bucket, BucketState, GroupHyper, Shard, lay_out
from superoffload.errors import StateError, SuperOffloadError, WorkerError
from superoffload.link import Link
from superoffload.memory import exceeds_caches
from superoffload.policy import SpeculationPolicy, choose_width, learn_from_journal, learn_from_overflow
from superoffload.stats import Stats
from superoffload.verdict import Verdict, decide

if TYPE_CHECKING:
    from superoffload.checkpoints.snapshot import Snapshot
    from superoffload.timeline import Timeline

Operation = _native.Operation

# Reserved per parameter and speculating bucket. One-byte codes leave 1.5 bytes for escapes, two-byte codes 0.5; and
# a little more, since the fewer parameters a bucket has the less they average out.
JOURNAL_BYTES_PER_PARAM = 2.5
_JOURNAL_BYTES_PER_BUCKET = 1024
# beta ** step is 0 in double precision from here on, so that 1 - beta ** step, the bias correction, is 1.
_CORRECTED_BY_ONE = 1 << 60
_SMALLEST_BUCKET, _LARGEST_BUCKET, _BUCKETS = 1 << 16, 1 << 25, 32


class SumExchange(Protocol):
    """Sums of squares of every rank; ``start`` and ``finish`` are called once per step."""

    def start(self, sums: Mapping[int, float]) -> None:
        """Those of this rank's shards, by index, in registration order."""

    def finish(self) -> Sequence[float] | None:
        """Those of all ranks, the same on each, in the order to fold them; None if no rank has a gradient."""


class LandingWatch(Protocol):
    """Told of every delivery that ``apply(later=True)`` has left for later."""

    def landing(self, buckets: Sequence[Bucket]) -> None:
        """They are about to be delivered; pieces that it takes out of ``present`` are not."""

    def landed(self, buckets: Sequence[Bucket]) -> SuperOffloadError | None:
        """They were delivered. What it returns is raised once everything is in order."""


@dataclass(frozen=True)
class CoreOptions:
    """``bucket_numel`` None: a 32nd of the parameters, within 64 Ki and 32 Mi elements. ``cpus``: one per thread."""

    speculation: str
    bucket_numel: int | None
    cpus: Sequence[int]


class Core:
    """Buckets, worker threads and the step. ``hyper_of(group)`` returns a group's current hyper-parameters."""

    def __init__(self, link: Link, options: CoreOptions, hyper_of: Callable[[int], GroupHyper]) -> None:
        self.link = link
        self.policy = SpeculationPolicy(options.speculation)
        self.pool = _native.WorkerPool(list(options.cpus))
        self.shards: list[Shard] = []
        self.buckets: list[Bucket] = []
        self._bucket_numel = options.bucket_numel
        self._hyper_of = hyper_of
        self._places: dict[int, list[tuple[Bucket, int]]] = {}
        self._failure: SuperOffloadError | None = None
        self._incoming: dict[int, Tensor] = {}
        self._order: list[int] = []  # arrivals of the first backward
        self._observed = False
        self._speculating = True  # for this step: no early stop so far
        self._partial = 0.0  # sum of squares of what was packed in this step
        self._proves_clip = math.inf
        self._unscale = 1.0
        self._shared = False  # the verdict of this step is also that of other ranks
        self._stats = Stats()
        self._journaled_numel = 0
        self._journaled_bytes = 0
        self.timeline: Timeline | None = None  # sets itself, and stands before link and pool, where a trace is wanted
        self.snapshot: Snapshot | None = None  # state of an earlier moment that is still being read
        self._landing: dict[Bucket, None] = {}  # stepped by apply(later=True), not delivered yet; in forward order
        self.watch: LandingWatch | None = None

    # ---- layout -----------------------------------------------------------------------------------------------

    def add_shards(self, shards: Sequence[Shard]) -> None:
        """New shards, in registration order. Their buckets follow those there are, in reverse order."""
        self.shards.extend(shards)
        self._attach(lay_out(list(reversed(shards)), self._numel_per_bucket()))

    def _numel_per_bucket(self) -> int:
        if self._bucket_numel is not None:
            return self._bucket_numel
        total = sum(shard.numel for shard in self.shards)
        return min(max(total // _BUCKETS, _SMALLEST_BUCKET), _LARGEST_BUCKET)

    def _attach(self, buckets: Sequence[Bucket]) -> None:
        speculates = self.policy.mode != "never"
        past_cache = exceeds_caches(sum(shard.numel for shard in self.shards))
        for bucket in buckets:
            self.link.attach(bucket)
            bucket.make_work(_journal_bytes(bucket) if speculates else 0, past_cache=past_cache)
            for i, piece in enumerate(bucket.pieces):
                self._places.setdefault(piece.shard.index, []).append((bucket, i))
        self.buckets.extend(buckets)

    def _follow_observed_order(self) -> None:
        """Once, after the first step: buckets in the order in which gradients really arrive."""
        before = [shard.index for shard in reversed(self.shards)]
        seen = set(self._order)
        order = self._order + [index for index in before if index not in seen]
        self._observed = True
        if order == before:
            return
        self.buckets, self._places = [], {}
        self._attach(lay_out([self.shards[i] for i in order], self._numel_per_bucket()))

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
        self.land(shard)
        self._incoming[shard.index] = gradient
        if not self._observed and in_backward:
            self._order.append(shard.index)
        places = self._places.get(shard.index, ())
        for bucket, place in places:  # first of all, so that an error further down leaves nothing half-known
            if bucket.state is BucketState.READY:  # packed by a decide() that came before this gradient
                bucket.move(BucketState.FILLING)
            bucket.present[place] = True
            bucket.missing -= 1
        for bucket, _ in places:
            if bucket.missing == 0:
                self._pack(bucket)
                if in_backward and self._worth_speculating():
                    self._speculate(bucket)

    def gradient_is(self, shard: Shard, gradient: Tensor) -> bool:
        """Whether the gradient that arrived has the bits of ``gradient``."""
        word = torch.int32 if gradient.dtype is torch.float32 else torch.int16
        arrived = self._incoming[shard.index]
        for bucket, place in self._places.get(shard.index, ()):
            piece = bucket.pieces[place]
            theirs = gradient[piece.start : piece.start + piece.numel]
            ours = arrived[piece.start : piece.start + piece.numel]
            if bucket.state is not BucketState.FILLING:  # what arrived may have been overwritten since it was packed
                ours = bucket.gradient[piece.offset : piece.offset + piece.numel]
            if not torch.equal(ours.contiguous().view(word), theirs.contiguous().view(word)):
                return False
        return True

    def retract(self, shard: Shard) -> None:
        """The gradient of ``shard`` was not final after all, or is gone: undo what was done with it."""
        if self._incoming.pop(shard.index, None) is None:
            return
        if not self._observed and shard.index in self._order:
            self._order.remove(shard.index)
        for bucket, place in self._places.get(shard.index, ()):
            self._undo_one(bucket)
            if bucket.state is BucketState.READY:
                bucket.move(BucketState.FILLING)
            bucket.present[place] = False
            bucket.missing += 1
            bucket.squares = 0.0
        self._partial = sum(bucket.squares for bucket in self.buckets)
        self._raise_failure()

    def restore(self, shard: Shard) -> None:
        """Undoes what was speculated on ``shard``; its gradient stays where it is. Before its master is written."""
        self.land(shard)
        for bucket, _ in self._places.get(shard.index, ()):
            self._undo_one(bucket)
        self._raise_failure()

    def _pack(self, bucket: Bucket) -> None:
        grads = [
            self._incoming[piece.shard.index] if present else None
            for piece, present in zip(bucket.pieces, bucket.present, strict=True)
        ]
        with self._caller_at_work():
            ticket = self.link.pack(bucket, grads)
        bucket.running = self.link.arrived(ticket)
        bucket.move(BucketState.READY)
        if not (self._speculating and bucket.running.done()):
            return
        for piece, present in zip(bucket.pieces, bucket.present, strict=True):
            if present:
                first = piece.start // BLOCK
                sums = piece.shard.block_sums[first : first + -(-piece.numel // BLOCK)]
                bucket.squares += float(np.sum(sums))
        self._partial += bucket.squares

    def _worth_speculating(self) -> bool:
        if self._speculating:
            # Early stop: a non-finite gradient, or the part of the norm that is known already proves a clip.
            self._speculating = self.policy.wants() and self._partial < self._proves_clip
        return self._speculating

    def _freeze(self, bucket: Bucket, factor: float) -> None:
        hyper = self._hyper_of(bucket.group)
        ahead = 1 if hyper.bias_correction else _CORRECTED_BY_ONE
        steps = [
            piece.shard.steps + ahead if present else 0
            for piece, present in zip(bucket.pieces, bucket.present, strict=True)
        ]
        bucket.work.freeze(
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
        width = choose_width(bucket, self._next_step_of(bucket))
        if width is None:
            return
        self.protect(piece.shard for piece in bucket.pieces)
        bucket.width = width
        self._freeze(bucket, self._unscale)
        bucket.running = self.pool.submit(bucket.work, Operation.step_journaled, width, bucket.running)
        bucket.move(BucketState.SPECULATED)
        self._stats.buckets_speculated += 1

    # ---- settling what was speculated -------------------------------------------------------------------------

    def _wait(self, bucket: Bucket) -> bool:
        """For the operation that runs on ``bucket``. False: a worker failed (see ``_raise_failure``)."""
        if bucket.running is None:
            return True
        try:
            bucket.running.wait()
        except RuntimeError as error:
            bucket.running = None
            self._failure = self._failure or WorkerError(str(error))
            return False
        bucket.running = None
        return True

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _settle_speculation(self, bucket: Bucket) -> None:
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
        self._settle_speculation(bucket)
        if bucket.state is BucketState.SPECULATED:
            bucket.running = self.pool.submit(bucket.work, Operation.undo)
            self._wait(bucket)
            self._mark_undone(bucket)

    def quiesce(self) -> None:
        """Masters and moments as after the last finished step; gradients that were packed stay packed."""
        self.land()
        for bucket in self.buckets:
            self._undo_one(bucket)
        self._raise_failure()

    def _take_back(self, state: BucketState) -> int:
        """Undoes every speculated bucket and ends the step of all with ``state``; returns how many were undone."""
        undone = []
        for bucket in self.buckets:
            if bucket.state is BucketState.SPECULATED:
                self._settle_speculation(bucket)
            if bucket.state is BucketState.SPECULATED:
                bucket.running = self.pool.submit(bucket.work, Operation.undo)
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
        self.land()
        if self.timeline is not None:
            self.timeline.deciding()
        for bucket in self.buckets:
            if bucket.state is BucketState.FILLING and any(bucket.present):
                self._pack(bucket)
        with self._caller_at_work():
            for bucket in self.buckets:
                if bucket.state is BucketState.READY:
                    self._wait(bucket)  # for the packed gradient, and with it the sums
            self._raise_failure()
            sums = {shard.index: shard.sum_of_squares() for shard in self.shards if shard.index in self._incoming}
        if exchange is None:
            return decide(sums.values(), unscale=unscale, max_grad_norm=max_grad_norm)
        with self._caller_at_work():
            exchange.start(sums)
            for bucket in self.buckets:  # the tail of the pipeline runs while the sums travel
                if bucket.state is BucketState.SPECULATED:
                    self._settle_speculation(bucket)
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
            self.policy.observe(verdict)
            if self.timeline is not None:
                self.timeline.decided(verdict)
            if verdict.found_inf:
                self._stats.buckets_skipped += self._take_back(BucketState.SKIPPED)
                self._stats.skipped_steps += 1
                self._end_step(whole=True)
                self._raise_failure()
                return
            self._settle_all()
            moving = [bucket for bucket in reversed(self.buckets) if bucket.state is not BucketState.FILLING]
            for bucket in moving:
                self._finish(bucket, verdict.gradient_factor)
            self._landing = dict.fromkeys(moving)
            self._count_step(verdict)
            if not (later and self._observed):  # the buckets of the first step make way for those in observed order
                self._deliver(moving)
            self._end_step(whole=True)
            self._raise_failure()

    @property
    def is_landing(self) -> bool:
        """Whether anything that ``apply(later=True)`` has left is not delivered yet."""
        return bool(self._landing)

    def landing_shards(self) -> dict[int, Shard]:
        """Those that are not delivered wholly yet, by index, in forward order."""
        return {piece.shard.index: piece.shard for bucket in self._landing for piece in bucket.stepped_pieces()}

    def land(self, shards: Shard | Iterable[Shard] | None = None) -> None:
        """Waits for and delivers what ``apply(later=True)`` left running: the buckets of ``shards``, or all of them."""
        if not self._landing:
            return
        buckets = list(self._landing)
        if shards is not None:
            several = [shards] if isinstance(shards, Shard) else shards
            wanted = {bucket for shard in several for bucket, _ in self._places.get(shard.index, ())}
            buckets = [bucket for bucket in buckets if bucket in wanted]
        if buckets:
            with self._caller_at_work():
                self._land(buckets)
                self._raise_failure()

    def _land(self, buckets: Sequence[Bucket]) -> None:
        began = _native.now_seconds()
        try:
            if self.watch is not None:
                self.watch.landing(buckets)
            self._deliver(buckets)
        finally:
            landed = [bucket for bucket in buckets if bucket not in self._landing]
            error = self.watch.landed(landed) if self.watch is not None else None
            if error is not None:
                error.__cause__, self._failure = self._failure, error
            if self.timeline is not None:
                self.timeline.landed(landed, began)
            for bucket in landed:
                bucket.renew()

    def _deliver(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:  # in forward order, each bucket as soon as it is done
            self._wait(bucket)
            self.link.deliver(bucket, _native.Completion.already_done())
            del self._landing[bucket]

    def settle(self) -> None:
        """Waits for what was speculated. WorkerError: a worker failed, the step was abandoned, nothing has changed.

        For callers who tell other ranks before any of them acts on the verdict.
        """
        with self._caller_at_work():
            self._settle_all()

    def _settle_all(self) -> None:
        """Every speculated bucket done; if a worker failed, the whole step is abandoned before anything shows.

        Not when other ranks act on the same verdict: they cannot take the step back any more, so it is completed here
        too, from the buckets as they were, and the error is raised with the step done.
        """
        self._journaled_numel = self._journaled_bytes = 0
        for bucket in self.buckets:
            if bucket.state is not BucketState.SPECULATED:
                continue
            self._settle_speculation(bucket)
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
            bucket.running = self.pool.submit(bucket.work, Operation.replay)
            bucket.move(BucketState.REPLAYED)
            self._stats.buckets_replayed += 1
            return
        self.protect(piece.shard for piece in bucket.pieces)
        self._freeze(bucket, factor)
        bucket.running = self.pool.submit(bucket.work, Operation.step)
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
        self.land()
        with self._caller_at_work():
            self._stats.buckets_abandoned += self._take_back(BucketState.ABANDONED)
            self._end_step(whole=False)
            self._raise_failure()

    def _end_step(self, *, whole: bool) -> None:
        """``whole``: backward ended, so that the order of its gradients is known."""
        if self.timeline is not None:
            self.timeline.end_step(self.buckets)
        for bucket in self.buckets:
            if bucket not in self._landing:
                bucket.renew()
        self._incoming.clear()
        self._partial = 0.0
        self._speculating = True
        self._shared = False
        if whole and not self._observed and self._order:
            self._follow_observed_order()
        self._order.clear()

    # ---- figures, digests, the end ----------------------------------------------------------------------------

    @contextmanager
    def _caller_at_work(self) -> Iterator[None]:
        """Time of the training thread spent here is optimizer time, and exposed."""
        began = _native.now_seconds()
        self.pool.enter()
        try:
            yield
        finally:
            self.pool.leave()
            self._stats.optimizer_seconds_exposed += _native.now_seconds() - began

    def stats(self) -> dict[str, float | int]:
        """Totals since construction (superoffload/stats.py)."""
        self._stats.optimizer_seconds = self.pool.busy_seconds
        self._stats.bytes_down = self.link.bytes_down
        self._stats.bytes_up = self.link.bytes_up
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
                digest.update(column(shard).contiguous().view(torch.uint8).numpy().data)
            result[name] = digest.hexdigest()
        return result

    def close(self) -> None:
        """Takes back what was speculated and ends the worker threads."""
        try:
            self.land()
            self.abandon()
        finally:
            self.pool.close()

    def __del__(self) -> None:
        # Workers must have ended before the tensors that they write to are freed, in whatever order that happens.
        if hasattr(self, "pool"):
            self.pool.close()


def _journal_bytes(bucket: Bucket) -> int:
    return int(JOURNAL_BYTES_PER_PARAM * bucket.padded) + _JOURNAL_BYTES_PER_BUCKET


def _same_bits(factor: float, other: float) -> bool:
    """As the kernels round them; of the two zeros each is only itself."""
    with np.errstate(over="ignore", under="ignore"):
        return bool(np.float32(factor).tobytes() == np.float32(other).tobytes())
