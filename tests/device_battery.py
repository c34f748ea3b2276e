"""The kernel battery on a device: its kernels launched through the driver, and buckets that go down, are stepped and
come up through the native pipeline. On a GPU, or over the stand-in for the driver: the same cases, the same bits.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.gpu_suite.pack_kernel import DriverKernels, Launch
from superoffload import _native, kernels
from superoffload.bucket import Bucket, Shard, lay_out
from superoffload.cuda import geometry
from superoffload.link import HostLink
from superoffload.placement import ResidentWork
from tests import kernel_cases as cases
from tests.kernel_battery import Case, norm_inputs, span_cases
from tests.kernel_tools import GUARD_BYTES, GUARD_VALUE
from tests.reference.convert import narrow, widen

KERNELS = Path(__file__).resolve().parents[1] / "csrc" / "cuda" / "kernels.cu"
NAMES = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}
FORMATS = {name: form for form, name in NAMES.items()}
WORDS = {"fp32": np.float32, "bf16": np.uint16, "fp16": np.float16}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BUCKET_NUMEL = 2048  # longer shards are cut into pieces of several buckets
TIMEOUT = 30.0
NOISE_STREAM = 12345 << 32 | 7

Types = tuple[str, str]
Array = npt.NDArray[Any]


def types_of(operation: str) -> tuple[Types, ...]:
    """The formats that kernels of this operation ("pack") are made for, by their list in kernels.cu."""
    name = f"SUPEROFFLOAD_{operation.upper()}_KERNELS"
    listed = re.search(rf"#define {name}\(X\)(.*?)\n\n", KERNELS.read_text(), re.DOTALL)
    assert listed is not None, f"kernels.cu lists no {operation} kernels"
    return tuple((FORMATS[a], FORMATS[b]) for a, b in re.findall(r"X\((\w+), \w+, (\w+), \w+\)", listed[1]))


PACKS, UNPACKS, STEPS = (types_of(operation) for operation in ("pack", "unpack", "step"))


def kernel_of(operation: str, types: Types) -> str:
    return f"{operation}_{NAMES[types[0]]}_{NAMES[types[1]]}"


# ---- where ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where kernels run. ``launch`` enqueues one by its name, ``synchronize`` waits for the current stream."""

    device: torch.device
    open_link: Callable[[], Any]
    launch: Launch
    synchronize: Callable[[], None]


def this_processor() -> Place:
    """Where the answers come from: the CPU's own kernels. It has none of the device's."""

    def launch(name: str, grid: int, arguments: Sequence[Any]) -> None:
        raise NotImplementedError(name)

    return Place(torch.device("cpu"), HostLink, launch, lambda: None)


def gpu() -> Place:
    """The first CUDA device, through libcuda."""
    from superoffload.cuda.device import TorchDevice
    from superoffload.cuda.link import CudaLink
    from superoffload.cuda.start import options_for

    device = TorchDevice(torch.device("cuda", 0))
    options = options_for(device, keep_grads=False)
    assert options.image, "no kernels: the warning above says why"
    launched = DriverKernels(0, options.image, device.current_stream, options.library)
    return Place(device.torch_device, lambda: CudaLink(device, options), launched.launch, torch.cuda.synchronize)


def stand_in(fake: Any) -> Place:
    """Likewise, the stand-in for the driver, whose kernels are those of csrc/cuda compiled for this processor."""
    from superoffload.cuda.link import CudaLink, CudaOptions
    from tests.fake_cuda import IMAGE, FakeDevice

    options = CudaOptions(image=IMAGE, timeout_seconds=TIMEOUT, library=fake.library)
    launched = DriverKernels(0, IMAGE, lambda: int(fake.current), fake.library)
    return Place(
        torch.device("cpu"), lambda: CudaLink(FakeDevice(fake), options), launched.launch, lambda: fake.synchronize()
    )


class Placed:
    """A copy of an array on a device, ``start`` elements behind an aligned address, between guards."""

    def __init__(self, values: Array, start: int, device: torch.device) -> None:
        self._begin = GUARD_BYTES + start * values.itemsize
        self._end = self._begin + values.nbytes
        raw = np.full(self._end + GUARD_BYTES, GUARD_VALUE, np.uint8)
        raw[self._begin : self._end] = np.ascontiguousarray(values).view(np.uint8)
        self._raw = torch.from_numpy(raw).to(device, copy=True)
        self._words = values.dtype
        form = next(form for form, word in WORDS.items() if values.dtype == word)
        self.tensor = self._raw[self._begin : self._end].view(DTYPES[form])
        self.address = int(self._raw.data_ptr()) + self._begin

    def read(self, what: str) -> Array:
        """Its values now; nothing beside them was written."""
        raw = self._raw.cpu().numpy()
        outside = np.concatenate([raw[: self._begin], raw[self._end :]])
        assert (outside == GUARD_VALUE).all(), f"written outside of {what}"
        values: Array = raw[self._begin : self._end].view(self._words).copy()
        return values


# ---- kernels alone --------------------------------------------------------------------------------------------------


def _starts(count: int) -> Iterator[int]:
    """Aligned every second time."""
    for number in range(count):
        yield cases.STARTS[number // 2 % len(cases.STARTS)] if number % 2 else 0


def _on(device: torch.device, array: Array) -> Tensor:
    return torch.from_numpy(array.view(np.uint8).reshape(-1)).to(device, copy=True)


def _arguments(table: Tensor, count: int, *addresses: Tensor) -> list[Any]:
    return [
        ctypes.c_void_p(table.data_ptr()),
        ctypes.c_uint(count),
        *(ctypes.c_void_p(address.data_ptr()) for address in addresses),
    ]


def packed_by_kernel(place: Place, types: Types) -> tuple[list[Array], Array, bool]:
    """Every input of the battery in one launch: packed gradients, block sums, whether anything is not finite."""
    inputs = list(norm_inputs(types[0]))
    gradients = [Placed(one, start, place.device) for one, start in zip(inputs, _starts(len(inputs)), strict=True)]
    offsets = [int(n) for n in np.cumsum([0, *(-(-one.size // 64) * 64 + i % 3 for i, one in enumerate(inputs))])]
    pieces = geometry.copy_pieces(
        (gradient.address, offset, one.size) for gradient, offset, one in zip(gradients, offsets, inputs, strict=False)
    )
    blocks = geometry.count_blocks(pieces)
    table = _on(place.device, pieces)
    packed = Placed(np.zeros(offsets[-1], WORDS[types[1]]), 0, place.device)
    sums = torch.full((blocks,), -1.0, dtype=torch.float64, device=place.device)
    flag = torch.zeros(1, dtype=torch.int32, device=place.device)
    name = kernel_of("pack", types)
    arguments = _arguments(table, len(pieces), packed.tensor, sums, flag)
    place.launch(name, geometry.grid_for(name, blocks), arguments)
    place.synchronize()
    values = packed.read(name)
    found = [values[offset : offset + one.size] for offset, one in zip(offsets, inputs, strict=False)]
    return found, sums.cpu().numpy(), bool(flag.item())


def packed_here(types: Types) -> tuple[list[Array], Array, bool]:
    """Likewise, by this processor's kernel."""
    found, sums = [], []
    for one in norm_inputs(types[0]):
        native = np.empty_like(one)
        sums.append(kernels.pack(one, native))
        found.append(native if types[0] == types[1] else widened(native, types[0]))
    joined = np.concatenate(sums)
    return found, joined, bool(np.isinf(joined).any())


def widened(gradient: Array, form: str) -> npt.NDArray[np.float32]:
    """As the kernels do it: which NaN it is stays, where widen() makes a signalling one quiet."""
    if form != "fp16":
        return widen(gradient)
    values = widen(gradient).view(np.uint32).copy()
    words = gradient.view(np.uint16).astype(np.uint32)
    raw = ((words & 0x8000) << 16) | 0x7F800000 | ((words & 0x3FF) << 13)
    return np.where((words & 0x7C00) == 0x7C00, raw, values).view(np.float32)


_STAGED = 9000
# (offset, numel) in the staged parameters: whole blocks and rests, aligned and not
_UNPACKED = ((0, 9000), (1024, 2048), (3, 1024), (5, 777), (64, 1), (0, 0), (128, 1023), (256, 1025), (6000, 3000))


def unpacked_by_kernel(place: Place, types: Types) -> list[Array]:
    """Hostile staged values into parameters of several lengths and alignments, in one launch."""
    staged = Placed(cases.gradient("hostile", types[0], _STAGED, 17), 0, place.device)
    targets = [
        Placed(np.zeros(numel, WORDS[types[1]]), start, place.device)
        for (_, numel), start in zip(_UNPACKED, _starts(len(_UNPACKED)), strict=True)
    ]
    pieces = geometry.copy_pieces(
        (target.address, offset, numel) for target, (offset, numel) in zip(targets, _UNPACKED, strict=True)
    )
    table, name = _on(place.device, pieces), kernel_of("unpack", types)
    grid = geometry.grid_for(name, geometry.count_blocks(pieces))
    place.launch(name, grid, _arguments(table, len(pieces), staged.tensor))
    place.synchronize()
    return [target.read(name) for target in targets]


def unpacked_here(types: Types) -> list[Array]:
    staged = cases.gradient("hostile", types[0], _STAGED, 17)
    values = staged if types[0] == types[1] else narrow(staged, types[1])
    return [values[offset : offset + numel] for offset, numel in _UNPACKED]


# ---- buckets through the pipeline -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """Formats of gradient and published parameter; of the moments; where the state is."""

    types: Types
    l2: bool = False
    moments: str = "fp32"
    resident: bool = False

    @property
    def recorded(self) -> str:
        """Its name in kernel_battery.json, where moments are fp32."""
        return f"step {'l2' if self.l2 else 'adamw'} {self.types[0]} to {self.types[1]}"


class Stepped:
    """One case of the battery as a shard; its memory starts at another alignment each."""

    def __init__(self, index: int, case: Case, setting: Setting, device: torch.device) -> None:
        self.case = case
        home = device if setting.resident else torch.device("cpu")
        start = case.start if case.number % 2 else 0
        old = [case.old.master, *(narrow(one, setting.moments) for one in case.old[1:])]
        self._state = [Placed(values, start, home) for values in old]
        self.gradient = Placed(case.gradient, start, device)
        self._parameter = Placed(np.zeros(case.length, WORDS[setting.types[1]]), start, device)
        self.shard = Shard(
            index=index,
            name=str(case),
            group=case.number % len(cases.HYPERS),
            numel=case.length,
            gradient_dtype=DTYPES[setting.types[0]],
            published_dtype=DTYPES[setting.types[1]],
            master=self._state[0].tensor,
            exp_avg=self._state[1].tensor,
            exp_avg_sq=self._state[2].tensor,
            target=lambda: self._parameter.tensor,
            noise_stream=NOISE_STREAM + index,
            offset=index % 2 * (2**32 - 700),  # so that the index of the noise wraps around inside of some
            resident=setting.resident,
        )

    @cached_property
    def results(self) -> list[Array]:
        """master, exp_avg, exp_avg_sq, parameter."""
        return [part.read(str(self.case)) for part in (*self._state, self._parameter)]


def stepped_by_pipeline(place: Place, setting: Setting) -> list[Stepped]:
    """Every case with elements: down, stepped in host memory or on the device, up."""
    spans = [case for case in span_cases(*setting.types, setting.l2) if case.length]
    found = [Stepped(index, case, setting, place.device) for index, case in enumerate(spans)]
    with _buckets(place, [one.shard for one in found]) as (link, buckets):
        for bucket in buckets:
            pack(link, bucket, [found[piece.shard.index].gradient.tensor for piece in bucket.pieces])
            _step(link, bucket, setting)
        place.synchronize()
    return found


def packed_by_pipeline(place: Place, form: str, *, resident: bool) -> list[list[Array]]:
    """Every gradient of the battery with elements: packed, and its block sums, as ``Kernel.pack`` gives them."""
    inputs = [one for one in norm_inputs(form) if one.size]
    gradients = [Placed(one, start, place.device) for one, start in zip(inputs, _starts(len(inputs)), strict=True)]
    home = place.device if resident else torch.device("cpu")
    nothing = torch.zeros(cases.LONGEST, device=home)
    shards = [
        Shard(
            index=index, name=f"gradient {index}", group=0, numel=one.size, gradient_dtype=DTYPES[form],
            published_dtype=DTYPES[form], master=nothing, exp_avg=nothing, exp_avg_sq=nothing,
            target=lambda: nothing, resident=resident,
        )
        for index, one in enumerate(inputs)
    ]  # fmt: skip
    found = [np.zeros_like(one) for one in inputs]
    with _buckets(place, shards) as (link, buckets):
        for bucket in buckets:
            pack(link, bucket, [gradients[piece.shard.index].tensor for piece in bucket.pieces])
            place.synchronize()
            words = bucket.gradient.cpu().view(torch.uint8).numpy().view(WORDS[form])
            for piece in bucket.pieces:
                packed = words[piece.offset : piece.offset + piece.numel]
                found[piece.shard.index][piece.start : piece.start + piece.numel] = packed
    return [[values, shard.block_sums] for values, shard in zip(found, shards, strict=True)]


@contextmanager
def _buckets(place: Place, shards: Sequence[Shard]) -> Iterator[tuple[Any, list[Bucket]]]:
    """Attached to a link of their own."""
    link = place.open_link()
    try:
        buckets = lay_out(shards, BUCKET_NUMEL)
        assert any(piece.start for bucket in buckets for piece in bucket.pieces), "some shards are cut"
        link.prepare(buckets, anew=True)
        for bucket in buckets:
            if bucket.resident:
                link.residency.attach(bucket)
                bucket.resident_work = ResidentWork(bucket)
            else:
                link.attach(bucket)
                bucket.make_work(0)
            bucket.present = [True] * len(bucket.pieces)
        yield link, buckets
    finally:
        link.close()


def pack(link: Any, bucket: Bucket, gradients: list[Tensor]) -> None:
    """Returns once they are packed and their sums are here."""
    _await(link.arrived(link.pack(bucket, gradients)))


def _step(link: Any, bucket: Bucket, setting: Setting) -> None:
    hyper = cases.HYPERS[bucket.group]
    work = bucket.resident_work or bucket.work
    work.freeze(
        lr=hyper.lr,
        beta1=hyper.beta1,
        beta2=hyper.beta2,
        eps=hyper.eps,
        weight_decay=hyper.weight_decay,
        gradient_factor=hyper.gradient_factor,
        l2=setting.l2,
        steps=[hyper.step] * len(bucket.pieces),
    )
    if bucket.resident:
        link.residency.step(bucket)
        return
    bucket.work.run_all(_native.Operation.step)
    _await(link.deliver(bucket, _native.Completion.already_done()))
    link.make_visible(bucket)


def _await(completion: _native.Completion) -> None:
    assert completion.wait(TIMEOUT), f"not done within {TIMEOUT:g} s"


def digest(results: Iterator[list[Array]]) -> str:
    """As kernel_battery makes them of an operation's cases."""
    found = hashlib.sha256()
    for arrays in results:
        for array in arrays:
            found.update(array.tobytes())
    return found.hexdigest()
