"""Shards are cut into buckets, which are kept in the order in which backward completes them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from superoffload import _native
from superoffload.engine.bucket import BLOCK, ELEMENT_TYPES, Bucket, Piece, Shard, aligned
from superoffload.engine.journal import LARGEST_JOURNAL_MEMORY, kept_bytes, reserved_bytes
from superoffload.engine.moments import scales_address
from superoffload.engine.options import EngineOptions, Listener
from superoffload.engine.placement import Measured, Placer, move_state
from superoffload.engine.schedule import Schedule
from superoffload.host.memory import exceeds_caches, is_out_of_memory, refused, room_on_device
from superoffload.links.base import Link

STATE_TYPES = {**ELEMENT_TYPES, torch.uint8: _native.ElementType.q8}


def shared_journals(buckets: Sequence[Bucket], reserved: Sequence[int]) -> list[_native.JournalMemory | None]:
    """Makes the memory in which ``buckets`` have their journals; returns, for each, the one that it shares.

    ``reserved``: bytes that each bucket adds; None is returned for one that adds none.
    """
    found: list[_native.JournalMemory | None] = []
    start = 0
    while start < len(buckets):
        end, total = start + 1, reserved[start]
        while end < len(buckets) and total + reserved[end] <= LARGEST_JOURNAL_MEMORY:
            total += reserved[end]
            end += 1
        try:
            memory = _native.JournalMemory(total, kept_bytes(total)) if total else None
        except MemoryError as error:
            raise refused(total, f"the undo journals (buckets: {end - start})") from error
        found += [memory if nbytes else None for nbytes in reserved[start:end]]
        start = end
    return found


def native_work(
    bucket: Bucket, journal: _native.JournalMemory | None, *, past_cache: bool = False
) -> _native.BucketWork:
    """Makes the work of a bucket whose gradient and shadow are allocated (``padded`` elements each).

    ``journal``: the memory of its journal; None: it has none. ``past_cache``: a step over all buckets exceeds the
    caches (superoffload/host/memory.py).
    """
    runs = [_run(bucket, place, piece, past_cache=past_cache) for place, piece in enumerate(bucket.pieces)]
    return _native.BucketWork(runs, journal)


def _run(bucket: Bucket, place: int, piece: Piece, *, past_cache: bool) -> _native.Run:
    shard = piece.shard
    return _native.Run(
        master=shard.master.data_ptr() + shard.master.element_size() * piece.start,
        exp_avg=shard.exp_avg.data_ptr() + shard.exp_avg.element_size() * piece.start,
        exp_avg_sq=shard.exp_avg_sq.data_ptr() + shard.exp_avg_sq.element_size() * piece.start,
        gradient=_address(bucket.gradients, bucket.gradient, place, piece),
        shadow=_address(bucket.published, bucket.shadow, place, piece),
        numel=piece.numel,
        gradient_type=ELEMENT_TYPES[bucket.gradient_dtype],
        shadow_type=ELEMENT_TYPES[bucket.published_dtype],
        state_type=STATE_TYPES[shard.exp_avg.dtype],
        first_index=piece.start,
        start=shard.offset % 2**32,
        axes=shard.axes,
        noise_stream=shard.noise_stream,
        past_cache=past_cache,
        split_master=shard.upper is not None,
        exp_avg_scales=scales_address(shard.exp_avg, shard.numel, piece.start),
        exp_avg_sq_scales=scales_address(shard.exp_avg_sq, shard.numel, piece.start),
    )


def _address(each: Sequence[Tensor | None] | None, together: Tensor, place: int, piece: Piece) -> int:
    """Returns where the elements of a piece are: in a tensor of their own (0: they have none), or among the others."""
    if each is None:
        return together.data_ptr() + together.element_size() * piece.offset
    own = each[place]
    return 0 if own is None else own.data_ptr()


_SMALLEST_BUCKET, _LARGEST_BUCKET, _BUCKETS = 1 << 16, 1 << 25, 32


class Layout:
    """Owns shards, buckets and their order, and decides where the state of each shard is."""

    def __init__(
        self,
        link: Link,
        options: EngineOptions,
        schedule: Schedule,
        listener: Listener,
        placer: Placer | None,
        protect: Callable[[Iterable[Shard]], None],
    ) -> None:
        """``protect`` has snapshots that are still read copy the shards whose state moves."""
        self.shards: list[Shard] = []
        self.buckets: list[Bucket] = []
        self.numel = 0  # of all buckets
        self.lacks_buckets = False  # until ``attach_waiting()`` has made those that are missing, or all of them anew
        self.observed = False  # the order of backward is known
        self.placer = placer
        self._link = link
        self._schedule = schedule
        self._listener = listener
        self._bucket_numel = options.bucket_numel
        self._two_phase = options.two_phase
        self._protect = protect
        self.journals: set[_native.JournalMemory] = set()  # the memory that they share
        self._host_bytes = 0  # of state and buckets, without journals
        self.only_bucket: dict[int, Bucket] = {}  # of shards, by index, that are in one bucket
        self.places: dict[int, list[tuple[Bucket, int]]] = {}  # of each shard: its buckets, and its place in them
        self._backward: list[int] = []  # shards in the observed order
        self._unattached: list[list[Shard]] = []  # shards without buckets, in the order of backward
        self._asleep_from_device: list[Shard] = []  # whose state returns there in ``wake()``
        self._outdated = False  # the buckets will be replaced; their packed gradients may still be needed
        self._past_cache = False  # a step over all buckets exceeds the caches

    # ---- buckets ----------------------------------------------------------------------------------------------

    def add_shards(self, shards: Sequence[Shard]) -> None:
        """Adds shards, in registration order. Their buckets follow the existing ones, in reverse order."""
        self.shards.extend(shards)
        self._unattached.append(list(reversed(shards)))
        self.lacks_buckets = True
        self.attach_waiting()

    def places_of(self, shard: Shard) -> Sequence[tuple[Bucket, int]]:
        """Returns the buckets that have pieces of ``shard``, each with the place of the piece in it."""
        return self.places.get(shard.index, ())

    def buckets_of(self, shard: Shard) -> list[Bucket]:
        return [bucket for bucket, _ in self.places_of(shard)]

    def attach_waiting(self) -> None:
        """Makes the buckets that are missing. Where memory was refused, the next arrival tries again."""
        if self._outdated:
            self._give_up_buckets()
        while self._unattached:
            self._attach(lay_out(self._unattached[0], self._numel_per_bucket()))
            del self._unattached[0]
        self.lacks_buckets = False

    def outdate(self) -> None:
        """Has the next ``attach_waiting()`` make all buckets anew."""
        self._outdated = self.lacks_buckets = True

    def make_way(self) -> None:
        """Replaces outdated buckets, now that nothing of the step before is needed."""
        if self._outdated:
            self.attach_waiting()

    def _lay_out_again(self) -> None:
        """Makes all buckets anew: at once, or, where packed gradients are the only copy that users can read, with
        ``make_way()`` or the next gradient."""
        self.outdate()
        if not self._link.frees_gradients:
            self.attach_waiting()

    def _give_up_buckets(self) -> None:
        self._listener.making_way()
        split = [(shard, shard.upper) for shard in self.shards if shard.upper is not None]
        # The link will use the shadows' memory again, which snapshots read also of shards that have moved since.
        self._protect(shard for shard, _ in split)
        for shard, upper in split:
            if not shard.resident:
                upper.gather()
        known = set(self._backward)
        order = self._backward + [shard.index for shard in reversed(self.shards) if shard.index not in known]
        self.buckets, self.places, self.journals = [], {}, set()
        self.only_bucket.clear()  # the intake keeps it
        self._unattached = [[self.shards[i] for i in order]]
        self._outdated = False

    def _numel_per_bucket(self) -> int:
        if self._bucket_numel is not None:
            return self._bucket_numel
        total = sum(shard.numel for shard in self.shards)
        return min(max(total // _BUCKETS, _SMALLEST_BUCKET), _LARGEST_BUCKET)

    def _attach(self, buckets: Sequence[Bucket]) -> None:
        self._past_cache = exceeds_caches(sum(shard.numel for shard in self.shards))
        self._link.prepare(buckets, anew=not self.buckets)
        journals = shared_journals(buckets, [self._journal_bytes(bucket) for bucket in buckets])
        for bucket, journal in zip(buckets, journals, strict=True):
            if bucket.resident:
                assert self.placer is not None
                self.placer.residency.attach(bucket)
                bucket.make_resident_work()
            else:
                self._link.attach(bucket)
                if not self._link.in_place:
                    bucket.work = native_work(bucket, journal, past_cache=self._past_cache)
        for bucket in buckets:  # once no memory can be refused any more: a further attempt may use this memory again
            if not bucket.resident:
                bucket.take_halves()
        for bucket in buckets:
            for i, piece in enumerate(bucket.pieces):
                self.places.setdefault(piece.shard.index, []).append((bucket, i))
        for bucket in buckets:
            for piece in bucket.pieces:
                if len(self.places[piece.shard.index]) == 1:
                    self.only_bucket[piece.shard.index] = bucket
        for number, bucket in enumerate(buckets, len(self.buckets)):
            bucket.number = number
        self.buckets.extend(buckets)
        self.journals.update(journal for journal in journals if journal is not None)
        self.numel = sum(bucket.numel for bucket in self.buckets)
        self._host_bytes = sum(map(_state_bytes, self.shards)) + sum(map(_bucket_bytes, self.buckets))

    def describe(self, bucket: Bucket) -> None:
        """Describes to the worker threads where the gradients and parameters of ``bucket`` are in this step."""
        bucket.work = native_work(bucket, None, past_cache=self._past_cache)

    def _journal_bytes(self, bucket: Bucket) -> int:
        split = any(piece.shard.upper is not None for piece in bucket.pieces)
        needs = self._schedule.mode != "never" or (split and self._two_phase)
        return reserved_bytes(bucket.padded) if needs and not bucket.resident else 0

    @property
    def host_bytes(self) -> int:
        """Returns the bytes of masters, moments, packed gradients, shadows and journals in host memory."""
        return self._host_bytes + self.journal_bytes_held

    @property
    def journal_bytes_held(self) -> int:
        """Returns the bytes of the journals' memory that are in use or kept for the next steps."""
        return sum(journal.held for journal in self.journals)

    # ---- order and place --------------------------------------------------------------------------------------

    def follow_observed_order(self, order: list[int]) -> None:
        """Orders buckets as gradients really arrive, once, after the first step."""
        before = [shard.index for shard in reversed(self.shards)]
        self._backward = _with_unseen(order, before)
        self.observed = True
        if self._place() or self._backward != before:
            self._lay_out_again()

    def place_by(self, measured: Measured) -> None:
        """Chooses by ``measured`` (placement="auto") and moves state accordingly, between steps."""
        assert self.placer is not None
        self.placer.measure(measured)
        if self._place():
            self._lay_out_again()

    def _place(self) -> bool:
        """Moves state to where the placer wants it; returns whether any moved, so that buckets must be made anew."""
        if self.placer is None:
            return False
        wanted = self.placer.choose([self.shards[i] for i in self._backward])
        moving = [shard for shard in self.shards if shard.resident != (shard.index in wanted)]
        moved = 0
        for shard in sorted(moving, key=lambda shard: not shard.resident):  # resident ones first, to make room
            try:
                move_state(shard, None if shard.resident else self.placer.residency.device)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                self.placer.had_no_room_for(shard.name)
                break
            moved += 1
        return moved > 0

    # ---- sleep ------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Gives back the memory of all buckets, and brings state from the device to host memory; nothing is under way.

        Where this raises, the next gradient has the buckets made anew.
        """
        self._give_up_buckets()
        self.lacks_buckets = True
        for shard in [shard for shard in self.shards if shard.resident]:
            move_state(shard, None)
            self._asleep_from_device.append(shard)
        self._link.give_back()
        self._host_bytes = sum(map(_state_bytes, self.shards))
        self._host_bytes += sum(shard.upper.nbytes for shard in self.shards if shard.upper is not None)

    def wake(self) -> None:
        """Takes the memory back and moves state back to the device. Where this raises, all is asleep as before."""
        try:
            with room_on_device("wake(): moving state back to the device", "Free memory there and call wake() again"):
                for shard in self._asleep_from_device:
                    assert self.placer is not None
                    move_state(shard, self.placer.residency.device)
            self.attach_waiting()
        except BaseException:
            waiting, self._asleep_from_device = self._asleep_from_device, []
            self.sleep()
            self._asleep_from_device = waiting
            raise
        self._asleep_from_device = []

    def measured(self) -> Measured | None:
        """Returns the measurements for "auto"; None where nothing was timed so far."""
        assert self.placer is not None
        times = self._schedule.times
        numel = sum(shard.numel for shard in self.shards)
        if not times.known or numel == 0:
            return None
        state = sum(shard.numel * (4 + 2 * shard.exp_avg.element_size()) for shard in self.shards)  # whole or split
        gradients = sum(shard.numel * shard.gradient_dtype.itemsize for shard in self.shards)
        return Measured(
            backward=times.backward,
            optimizer=times.seconds(_native.Operation.step, numel),
            free_bytes=self.placer.residency.free_bytes(),
            numel=numel,
            bytes_per_param=(state + gradients) / numel,
            buckets=len(self.buckets),
        )


def _with_unseen(order: Sequence[int], guess: Sequence[int]) -> list[int]:
    """Returns ``order`` with the others of ``guess``, which had no gradient yet, each behind the one that it follows in
    ``guess``: experts without a token stay beside their like."""
    followers: dict[int | None, list[int]] = defaultdict(list)
    last, seen = None, set(order)
    for index in guess:
        if index in seen:
            last = index
        else:
            followers[last].append(index)
    return followers[None] + [index for one in order for index in (one, *followers[one])]


def _state_bytes(shard: Shard) -> int:
    kept = () if shard.resident else (shard.master, shard.exp_avg, shard.exp_avg_sq)
    return shard.block_sums.nbytes + sum(tensor.nbytes for tensor in kept)


def _bucket_bytes(bucket: Bucket) -> int:
    """Counts what buckets have in host memory; gradients that stay where they arrived are not ours."""
    if bucket.resident:
        return 0
    return bucket.shadow.nbytes + (0 if bucket.gradients else bucket.gradient.nbytes)


def lay_out(shards: Sequence[Shard], bucket_numel: int) -> list[Bucket]:
    """Cuts ``shards``, given in the order of backward, into buckets of about ``bucket_numel`` elements.

    A bucket holds shards of one group, one pair of dtypes and one place of state, whose gradients are all final in
    backward or all later. A shard larger than a bucket is cut at multiples of the norm's block. Buckets come in the
    order in which backward completes them.
    """
    step = max(BLOCK, bucket_numel // BLOCK * BLOCK)
    open_pieces: dict[tuple[int, torch.dtype, torch.dtype, bool, bool], list[Piece]] = {}
    buckets: list[Bucket] = []
    for shard in shards:
        key = (shard.group, shard.gradient_dtype, shard.published_dtype, shard.resident, shard.reduced_later)
        start = 0
        while start < shard.numel:
            pieces = open_pieces.setdefault(key, [])
            offset = aligned(pieces[-1].offset + pieces[-1].numel) if pieces else 0
            numel = shard.numel - start
            if pieces and numel > step - offset:  # start a new bucket rather than cut a shard that would fit one
                buckets.append(Bucket(open_pieces.pop(key)))
                continue
            numel = min(numel, step)
            pieces.append(Piece(shard, start, numel, offset))
            start += numel
            if offset + numel >= step:
                buckets.append(Bucket(open_pieces.pop(key)))
    position = {shard.index: i for i, shard in enumerate(shards)}
    buckets.extend(Bucket(pieces) for pieces in open_pieces.values())
    buckets.sort(key=lambda bucket: max(position[piece.shard.index] for piece in bucket.pieces))
    return buckets
