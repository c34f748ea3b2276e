"""Links a CUDA device to host memory. This code runs once per bucket and step; the rest is native."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from superoffload import _native
from superoffload.engine.bucket import ELEMENT_TYPES, Bucket, Piece
from superoffload.errors import DeviceError, KernelsUnavailable, TornStep, warn
from superoffload.host.bits import BitSums, SumsByTorch
from superoffload.host.environment import device_timeout
from superoffload.links.base import PackTicket
from superoffload.links.cuda import geometry
from superoffload.links.cuda.bit_sums import CudaBitSums, SumsThere, sums_per_block
from superoffload.links.cuda.blocks import Blocks
from superoffload.links.cuda.device import Device, TorchDevice
from superoffload.links.cuda.geometry import blocks_of
from superoffload.links.cuda.pinned import ALIGN, LARGEST_REGISTRATION, PinnedArena, aligned, taken, warn_unpinned


@dataclass(frozen=True)
class _Memory:
    """Holds a bucket's memory on the device as long as the bucket is attached."""

    bucket: _native.DeviceBucket
    table: Tensor  # for the step kernel


class CudaResidency:
    """Serves a ``CudaLink``'s resident buckets. ``attach_native`` makes the native bucket and allocates its sums."""

    def __init__(
        self,
        device: Device,
        pipeline: _native.CudaPipeline,
        attach_native: Callable[[Bucket, int, str], _native.DeviceBucket],
    ) -> None:
        self._device = device
        self._pipeline = pipeline
        self._attach_native = attach_native
        self._memory: dict[Bucket, _Memory] = {}
        self._without_event = False  # a step is running, and no event tells when it ends

    @property
    def device(self) -> torch.device:
        return self._device.torch_device

    def attach(self, bucket: Bucket) -> None:
        nbytes = bucket.padded * bucket.gradient_dtype.itemsize
        table = aligned(nbytes)
        memory = self._device.empty(table + len(bucket.pieces) * geometry.STEP_PIECE.itemsize)
        bucket.use_memory(gradient=memory[:nbytes].view(bucket.gradient_dtype))
        native = self._attach_native(bucket, bucket.gradient.data_ptr(), geometry.step_kernel(bucket))
        self._memory[bucket] = _Memory(native, memory[table:])

    def drain(self, timeout_seconds: float) -> bool:
        """Tells whether no step is under way; if so, frees everything of the buckets so far."""
        until = time.monotonic() + timeout_seconds
        if self._without_event:
            return False
        while not all(self._pipeline.has_stepped(memory.bucket) for memory in self._memory.values()):
            if time.monotonic() > until:
                return False
            time.sleep(0.0005)
        self._memory.clear()
        return True

    def step(self, bucket: Bucket) -> None:
        assert bucket.resident_work is not None
        scalars = bucket.resident_work.scalars
        table = geometry.step_table(bucket, scalars)
        memory = self._memory[bucket]
        present = [piece.shard for piece, frozen in zip(bucket.pieces, scalars, strict=True) if frozen is not None]
        try:
            behind = self._pipeline.step(
                memory.bucket,
                current=self._device.current_stream(),
                table=table.tobytes(),
                count=len(table),
                blocks=geometry.count_blocks(table),
                device_table=memory.table.data_ptr(),
            )
        except RuntimeError as error:
            raise DeviceError(f"{present[0].name}: its step on the device could not be launched: {error}") from error
        if behind:
            self._without_event = True
            raise TornStep(
                f"{present[0].name}: its step on the device was launched, but the device failed behind it: {behind}. "
                "Make a new optimizer and load the last checkpoint"
            )
        torch.autograd.graph.increment_version([shard.target() for shard in present])

    def free_bytes(self) -> int:
        return self._device.free_bytes()


SLOTS = 2  # staging on the device: one is packed while the other is copied
_FLAG_BYTES = 4096
_STEPS_SECONDS = 1.0  # limit for steps on the device, once closing has begun
_LEAKED: list[object] = []  # memory that a device was still using when its link was closed


@dataclass(frozen=True)
class CudaOptions:
    """Holds a link's options. ``keep_grads``: see ``superoffload.AdamW``. ``image``: compiled kernels; empty: copies,
    and sums on the CPU. ``arrival_flag``: the device writes a word of host memory behind each copy; False: the link
    queries the device's events."""

    keep_grads: bool = False
    image: bytes = b""
    arrival_flag: bool = True
    timeout_seconds: float = 600.0
    chunk: int = LARGEST_REGISTRATION
    library: str = "libcuda.so.1"


class CudaLink:
    """Serves gradients and parameters on a device; everything else is in host memory."""

    in_place = False
    asynchronous = True

    def __init__(self, device: Device, options: CudaOptions) -> None:
        self.bytes_down = 0
        self.bytes_up = 0
        self.frees_gradients = not options.keep_grads
        self._options = options
        self._device = device
        self._pid = os.getpid()
        self._closed = False
        self._buckets: dict[Bucket, _native.DeviceBucket] = {}
        self._targets: dict[Bucket, list[Tensor]] = {}
        self._written_on: dict[Bucket, set[int]] = {}  # streams that gradients came from since the last pack
        self._staged: set[Bucket] = set()  # new parameters have gone up before the verdict, or will
        self._readers: set[int] = set()  # streams that read parameters besides the current one
        self._arenas: list[PinnedArena] = []
        self._on_device: list[Tensor] = []  # scratch memory of the buckets of every arena
        self._staging: list[Tensor] = []
        self._scratch_used = 0
        with _translated("starting the device"):
            self._gpu = _native.CudaGpu(options.library, device.ordinal)
            self._flag = PinnedArena(self._gpu, _FLAG_BYTES)
            flag = self._flag.take(1, torch.int32)
            # Packing frees memory and feeds the worker threads, so it goes before backward's own kernels.
            self._pack_stream = device.make_stream(ahead=True)
            self._down_stream, self._up_stream = device.make_stream(), device.make_stream()
            self._pipeline = _native.CudaPipeline(
                self._gpu,
                pack=self._pack_stream,
                down=self._down_stream,
                up=self._up_stream,
                flag=flag.data_ptr() if self._flag.pinned and options.arrival_flag else 0,
                image=options.image,
                timeout_seconds=options.timeout_seconds,
            )
        self._blocks = Blocks(device, self._pipeline, self._pack_stream)
        self._residency = CudaResidency(device, self._pipeline, self._attach_resident)
        self._kernel_sums: CudaBitSums | None = None
        if self._pipeline.has_kernels:
            self._kernel_sums = CudaBitSums(device, self._gpu, self._pipeline, options.timeout_seconds)
        self.bit_sums: BitSums = self._kernel_sums or SumsByTorch()
        self.sums_what_it_packs = self._pipeline.has_kernels

    @property
    def residency(self) -> CudaResidency | None:
        """Keeps state on the device (superoffload/engine/placement.py); None without kernels."""
        return self._residency if self._pipeline.has_kernels else None

    @property
    def uses_flag(self) -> bool:
        """Tells whether the device reports arrivals by a word that it writes; its driver may refuse that."""
        return self._pipeline.uses_flag

    @property
    def bytes_up_early(self) -> int:
        """Counts the parameters' bytes that went up before the verdict."""
        return self._pipeline.bytes_early

    @property
    def pinned(self) -> bool:
        """Tells whether all host memory could be pinned."""
        return all(arena.pinned for arena in self._all_arenas())

    @property
    def pinned_bytes(self) -> int:
        return sum(arena.nbytes for arena in self._all_arenas() if arena.pinned)

    def _all_arenas(self) -> list[PinnedArena]:
        tables = self._kernel_sums.arenas if self._kernel_sums is not None else []
        return [*self._arenas, self._flag, *tables]

    # ---- memory -----------------------------------------------------------------------------------------------

    def prepare(self, buckets: Sequence[Bucket], *, anew: bool) -> None:
        with _translated("reserving memory"):
            if anew:
                unpacked = set().union(*self._written_on.values())  # those of gradients that arrived before this
                self._start_anew()
                self._written_on.update((bucket, set(unpacked)) for bucket in buckets)
            scratch = self._device.empty(sum(map(_scratch_bytes, buckets)) + ALIGN)
            before = len(self._arenas)
            self._reserve_host(sum(map(_host_bytes, buckets)))
            try:
                self._reserve_staging([bucket for bucket in [*self._buckets, *buckets] if not bucket.resident])
            except RuntimeError:  # a further attempt must not find more arenas each time
                if not anew:
                    self._close_arenas(self._arenas[before:], idle=True)
                    del self._arenas[before:]
                raise
            self._on_device.append(scratch)
            self._scratch_used = 0
            if self._pipeline.has_kernels and self.frees_gradients:
                self._blocks.lay_out([*self._buckets, *buckets])

    def _start_anew(self) -> None:
        """Frees everything that belongs to the buckets so far."""
        if self._buckets:
            self.drain(self._options.timeout_seconds, steps=True)
            self._blocks.clear()
        self._buckets.clear()
        self._targets, self._written_on, self._on_device = {}, {}, []

    def give_back(self) -> None:
        with _translated("giving memory back"):
            self._start_anew()
            self.drain(self._options.timeout_seconds)
            self._pipeline.set_staging(down=0, slot_bytes=0, slots=0, up=0)
        self._close_arenas(self._arenas, idle=True)
        self._staging, self._arenas = [], []

    def _reserve_host(self, nbytes: int) -> None:
        if not self._buckets and self._arenas and self._arenas[0].nbytes >= nbytes:
            (arena,) = self._arenas[:1]
            arena.reset()
            self._close_arenas(self._arenas[1:], idle=True)
            self._arenas = [arena]
            return
        if not self._buckets:
            self._close_arenas(self._arenas, idle=True)
            self._arenas = []
        # Buckets in the order of the first backward may need a little more, for gaps between their pieces.
        arena = PinnedArena(self._gpu, nbytes + (nbytes >> 6) + (1 << 16), chunk=self._options.chunk)
        warn_unpinned(arena)
        self._arenas.append(arena)

    def _reserve_staging(self, buckets: Sequence[Bucket]) -> None:
        if not self._pipeline.has_kernels:
            return
        down = max((_nbytes(b.padded, b.gradient_dtype) for b in buckets), default=0)
        up = max((_nbytes(b.padded, b.published_dtype) for b in buckets if len(b.pieces) > 1), default=0)
        if self._staging and self._staging[0].numel() >= SLOTS * down and self._staging[1].numel() >= up:
            return
        self.drain(self._options.timeout_seconds)
        self._staging = [self._device.empty(SLOTS * down), self._device.empty(up)]
        below, above = (memory.data_ptr() for memory in self._staging)
        self._pipeline.set_staging(down=below, slot_bytes=down, slots=SLOTS if down else 0, up=above)

    def attach(self, bucket: Bucket) -> None:
        arena = self._arenas[-1]
        with _translated("reserving memory"):
            bucket.use_memory(
                gradient=arena.take(bucket.padded, bucket.gradient_dtype),
                shadow=arena.take(bucket.padded, bucket.published_dtype),
            )
        self._attach_native(bucket, packed=bucket.gradient.data_ptr(), shadow=bucket.shadow.data_ptr())

    def _attach_resident(self, bucket: Bucket, packed: int, step_kernel: str) -> _native.DeviceBucket:
        return self._attach_native(bucket, resident=packed, step_kernel=step_kernel)

    def _attach_native(
        self, bucket: Bucket, *, packed: int = 0, shadow: int = 0, resident: int = 0, step_kernel: str = ""
    ) -> _native.DeviceBucket:
        nbytes = _scratch_bytes(bucket)
        with _translated("reserving memory"):
            scratch = self._arenas[-1].take(nbytes, torch.uint8)
            on_device = aligned(self._on_device[-1].data_ptr()) + self._scratch_used
            self._scratch_used += nbytes
            self._buckets[bucket] = self._pipeline.make_bucket(
                pieces=[(piece.offset, piece.numel, piece.sums_address) for piece in bucket.pieces],
                gradient_type=ELEMENT_TYPES[bucket.gradient_dtype],
                published_type=ELEMENT_TYPES[bucket.published_dtype],
                packed=packed,
                shadow=shadow,
                scratch=scratch.data_ptr(),
                device_scratch=on_device,
                resident=resident,
                step_kernel=step_kernel,
            )
        return self._buckets[bucket]

    # ---- a step -----------------------------------------------------------------------------------------------

    def check_stream(self) -> None:
        if self._device.is_capturing():
            raise DeviceError(
                "gradients cannot be packed while a CUDA graph is captured: replaying it runs none of the optimizer's "
                "hooks, so it would step nothing. Run backward and step() outside of torch.cuda.graph(); to have "
                "forward and backward as graphs all the same, give the model to torch.cuda.make_graphed_callables() "
                "before the optimizer is made: it captures without hooks, and its backward runs them at every replay"
            )

    def read_on(self, stream: int) -> None:
        self._readers.add(stream)

    def received(self, bucket: Bucket) -> None:
        self._written_on.setdefault(bucket, set()).add(self._device.current_stream())

    def pack(self, bucket: Bucket, grads: Sequence[Tensor | None]) -> PackTicket:
        bit_sums = self._room_for_bit_sums(bucket, grads)
        size = bucket.gradient_dtype.itemsize
        addresses = [0] * len(grads)
        for i, (piece, grad) in enumerate(zip(bucket.pieces, grads, strict=True)):
            if grad is not None:
                addresses[i] = grad.data_ptr() + size * piece.start
                if not bucket.resident:
                    self.bytes_down += size * piece.numel
        current = self._device.current_stream()
        # The memory is written again without asking the allocator, so the streams of backward wait themselves.
        kept = any(piece.shard.keeps_gradient for piece in bucket.pieces)
        unasked = self._device.reuses_unasked()
        waits = kept or not self.frees_gradients or unasked
        released = [grad for grad in grads if grad is not None] if self.frees_gradients and not unasked else []
        others = sorted(self._written_on.get(bucket, set()) - {current})
        self._blocks.free()  # frees memory that the next block may take
        try:
            with _translated(f"packing {bucket.pieces[0].shard.name}"):
                native = self._buckets[bucket]
                block = self._blocks.take(bucket, native) if bucket.final and not waits else 0
                arrival = self._pipeline.pack(
                    native,
                    current=current,
                    addresses=addresses,
                    keep=waits,
                    others=others,
                    block=block,
                    bit_sums=min((one.address for one in bit_sums.values()), default=0),
                )
            self._written_on.pop(bucket, None)  # only now, since a failed packing is tried again
            if not waits:
                self._blocks.linger(native, current, released)
            released = []
        except BaseException:
            released += [one.memory for one in bit_sums.values()][:1]  # all of them share one memory
            raise
        finally:  # the kernel may run although a later call has failed
            self._device.release(released, self._pack_stream)
        return PackTicket(arrival, bit_sums)

    def _room_for_bit_sums(self, bucket: Bucket, grads: Sequence[Tensor | None]) -> Mapping[Piece, SumsThere]:
        """Allocates the sums of all packed pieces if any shard asks for them: its gradient is kept, so the current
        stream waits for the kernel that writes them."""
        packed = [piece for piece, grad in zip(bucket.pieces, grads, strict=True) if grad is not None]
        if self._kernel_sums is None or not any(piece.shard.sums_gradient for piece in packed):
            return {}
        counts = [sums_per_block(bucket.gradient_dtype) * blocks_of(piece.numel) for piece in packed]
        return dict(zip(packed, self._kernel_sums.room(counts), strict=True))

    def came_down(self, nbytes: int) -> None:
        self.bytes_down += nbytes

    def stage(self, bucket: Bucket, after: _native.Completion) -> None:
        with _translated(f"sending up {bucket.pieces[0].shard.name}"):
            self._pipeline.stage(self._buckets[bucket], after=after, present=bucket.present)
        if self._blocks.has(bucket):
            self._staged.add(bucket)

    def has_staged(self, bucket: Bucket) -> bool:
        return bucket in self._staged

    def unstage(self, bucket: Bucket) -> None:
        self._staged.discard(bucket)
        if self._pipeline.unstage(self._buckets[bucket]):  # it has travelled, and is discarded
            self.bytes_up += sum(_nbytes(piece.numel, bucket.published_dtype) for piece in bucket.stepped_pieces())

    def step_ended(self, *, whole: bool) -> None:
        self._staged.clear()
        self._blocks.step_ended(pending=self._targets, whole=whole)

    def deliver(self, bucket: Bucket, after: _native.Completion) -> _native.Completion:
        if bucket not in self._staged:  # forward shall have the memory, which nothing waits in
            self._blocks.give_back(bucket)
        size = bucket.published_dtype.itemsize
        addresses = [0] * len(bucket.pieces)
        targets = []
        for i, (piece, present) in enumerate(zip(bucket.pieces, bucket.present, strict=True)):
            if present:
                target = piece.shard.target()
                targets.append(target)
                addresses[i] = target.data_ptr() + size * piece.start
                self.bytes_up += size * piece.numel
        self._targets[bucket] = targets  # keeps their memory until the copy is ordered
        try:
            with _translated(f"delivering {bucket.pieces[0].shard.name}"):
                return self._pipeline.deliver(
                    self._buckets[bucket], after=after, current=self._device.current_stream(), addresses=addresses
                )
        except DeviceError:
            del self._targets[bucket]
            raise

    def has_room(self, nbytes: int) -> bool:
        return nbytes <= self._device.free_bytes()

    def make_visible(self, bucket: Bucket) -> None:
        with _translated(f"delivering {bucket.pieces[0].shard.name}"):
            for stream in {self._device.current_stream(), *self._readers}:
                self._pipeline.make_visible(self._buckets[bucket], current=stream)
        self._blocks.give_back(bucket)
        targets = self._targets.pop(bucket, [])
        if targets:
            torch.autograd.graph.increment_version(targets)

    def await_copies(self) -> None:
        self.drain(self._options.timeout_seconds)

    def drain(self, timeout_seconds: float, *, steps: bool = False) -> None:
        """Waits until no copy is under way; with ``steps``, no step on the device either, and frees their buckets."""
        if not self._pipeline.drain(timeout_seconds) or (steps and not self._residency.drain(timeout_seconds)):
            raise DeviceError(
                f"the device did not finish its copies within {timeout_seconds:g} s; is it hung, or shared? A longer "
                "time: SUPEROFFLOAD_DEVICE_TIMEOUT=seconds"
            )
        self._blocks.free()

    # ---- the end ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        stepped = self._drain_steps()
        idle = self._pipeline.close(keep_kernels=not stepped) and stepped
        blocks = self._blocks.clear()
        if not idle:
            held = [*self._on_device, *self._staging, *self._targets.values(), *blocks]
            _LEAKED.extend([*held, self._residency, self._kernel_sums])
        self._close_arenas(self._all_arenas(), idle=idle)
        self._on_device, self._staging, self._targets = [], [], {}

    def _drain_steps(self) -> bool:
        try:
            summed = self._kernel_sums is None or self._kernel_sums.drain(_STEPS_SECONDS)
            return self._residency.drain(_STEPS_SECONDS) and summed
        except RuntimeError:  # the device has failed, and an earlier call has raised
            return False

    def _close_arenas(self, arenas: Sequence[PinnedArena], *, idle: bool) -> None:
        for arena in arenas:
            arena.close(idle=idle)


def _nbytes(numel: int, dtype: torch.dtype) -> int:
    return numel * dtype.itemsize


def _scratch_bytes(bucket: Bucket) -> int:
    return _native.cuda_scratch_bytes([piece.numel for piece in bucket.pieces])


def _host_bytes(bucket: Bucket) -> int:
    if bucket.resident:
        return taken(_scratch_bytes(bucket))
    packed, shadow = (_nbytes(bucket.padded, dtype) for dtype in (bucket.gradient_dtype, bucket.published_dtype))
    return sum(map(taken, (packed, shadow, _scratch_bytes(bucket))))


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """Turns the native side's errors into ours."""
    try:
        yield
    except DeviceError:
        raise
    except RuntimeError as error:
        raise DeviceError(f"{what}: {error}") from error
    except MemoryError as error:
        raise DeviceError(
            f"{what}: the host is out of memory; close other programs, or spread the parameters over more ranks"
        ) from error


LIBRARY_VARIABLE = "SUPEROFFLOAD_LIBCUDA"


def cuda_link(device: torch.device, *, keep_grads: bool | None) -> CudaLink:
    """Makes the link for parameters on ``device``, with the settings of this process' environment."""
    opened = TorchDevice(device)
    return CudaLink(opened, options_for(opened, keep_grads=keep_grads))


def options_for(device: TorchDevice, *, keep_grads: bool | None) -> CudaOptions:
    return CudaOptions(
        keep_grads=bool(keep_grads),
        image=kernels_for(torch.cuda.get_device_capability(device.torch_device)),
        timeout_seconds=device_timeout(),
        library=os.environ.get(LIBRARY_VARIABLE) or CudaOptions.library,
    )


def kernels_for(capability: tuple[int, int]) -> bytes:
    """Returns the compiled kernels; empty, with a warning, if nothing can compile them."""
    from superoffload.links.cuda.compile import compile_kernels

    try:
        return compile_kernels(f"sm_{capability[0]}{capability[1]}")
    except KernelsUnavailable as error:
        warn(
            f"{error}. Training goes on without them: gradients are copied one by one and summed on the "
            "CPU, with the same result"
        )
        return b""
