"""The kernel battery on a device: buckets go down through the native pipeline, are stepped in host memory or on the
device, and come up. On a GPU, or over the stand-in for the driver: the same cases, the same bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from superoffload import _native
from superoffload.engine.bucket import Bucket, Shard
from superoffload.engine.layout import lay_out, native_work
from superoffload.engine.master_halves import UpperHalves
from superoffload.links.host import HostLink
from tests.support import kernel_inputs as cases
from tests.support.checkout import ROOT
from tests.support.guarded_arrays import GUARD_BYTES, GUARD_VALUE, halves_of, scalars_of
from tests.support.kernel_battery import Case, norm_inputs, span_cases
from tests.support.reference import eight_bit
from tests.support.reference.convert import join, narrow
from tests.support.reference.stochastic import noise

KERNELS = ROOT / "csrc" / "cuda" / "kernels.cu"
FORMATS = {"f32": "fp32", "bf16": "bf16", "f16": "fp16"}  # as kernels.cu has them -> as the battery
WORDS = {"fp32": np.float32, "bf16": np.uint16, "fp16": np.float16, "remainder": np.int16, "q8": np.uint8}
DTYPES = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "remainder": torch.int16, "q8": torch.uint8,
}  # fmt: skip
BUCKET_NUMEL = 2048  # longer shards are cut into pieces of several buckets
TIMEOUT = 30.0
NOISE_STREAM = 12345 << 32 | 7

Types = tuple[str, str]
Array = npt.NDArray[Any]


def step_types() -> tuple[Types, ...]:
    """The formats of gradient and parameter that the device can step, by their lists in kernels.cu; "split" is a bf16
    parameter whose master is split."""
    whole, split = _listed("STEP_KERNELS"), _listed("SPLIT_STEP_KERNELS")
    return (
        *((FORMATS[a], FORMATS[b]) for a, b in re.findall(r"X\((\w+), \w+, (\w+), \w+\)", whole)),
        *((FORMATS[a], "split") for a in re.findall(r"X\((\w+), \w+\)", split)),
    )


def _listed(name: str) -> str:
    listed = re.search(rf"#define SUPEROFFLOAD_{name}\(X\)(.*?)\n\n", KERNELS.read_text(), re.DOTALL)
    assert listed is not None, f"kernels.cu lists no {name}"
    return listed[1]


# ---- where ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where gradients come from and parameters are. ``synchronize`` waits for the current stream."""

    device: torch.device
    open_link: Callable[[], Any]
    synchronize: Callable[[], None]


def this_processor() -> Place:
    """Where the answers come from: the CPU's own kernels."""
    return Place(torch.device("cpu"), HostLink, lambda: None)


def gpu() -> Place:
    """The first CUDA device, through libcuda."""
    from superoffload.links.cuda.device import TorchDevice
    from superoffload.links.cuda.link import CudaLink, options_for

    device = TorchDevice(torch.device("cuda", 0))
    options = options_for(device, keep_grads=False)
    assert options.image, "no kernels: the warning above says why"
    return Place(device.torch_device, lambda: CudaLink(device, options), torch.cuda.synchronize)


def stand_in(fake: Any) -> Place:
    """Likewise, the stand-in for the driver, whose kernels are those of csrc/cuda compiled for this processor."""
    from superoffload.links.cuda.link import CudaLink, CudaOptions
    from tests.support.fake_cuda import IMAGE, FakeDevice

    options = CudaOptions(image=IMAGE, timeout_seconds=TIMEOUT, library=fake.library)
    return Place(torch.device("cpu"), lambda: CudaLink(FakeDevice(fake), options), lambda: fake.synchronize())


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

    def read(self, what: str) -> Array:
        """Its values now; nothing beside them was written."""
        raw = self._raw.cpu().numpy()
        outside = np.concatenate([raw[: self._begin], raw[self._end :]])
        assert (outside == GUARD_VALUE).all(), f"written outside of {what}"
        values: Array = raw[self._begin : self._end].view(self._words).copy()
        return values


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
        old = [case.old.master, *self._moments(setting.moments)]
        self._upper: Placed | None = None
        published = setting.types[1]
        if published == "split":
            published = "bf16"
            halves = halves_of(case.old.master)
            self._upper, old[0] = Placed(halves.upper, start, home), halves.remainder
        self._state = [Placed(values, start, home) for values in old]
        self.gradient = Placed(case.gradient, start, device)
        self._parameter = Placed(np.zeros(case.length, WORDS[published]), start, device)
        self.shard = Shard(
            index=index,
            name=str(case),
            group=case.number % len(cases.HYPERS),
            numel=case.length,
            gradient_dtype=DTYPES[setting.types[0]],
            published_dtype=DTYPES[published],
            master=self._state[0].tensor,
            exp_avg=self._state[1].tensor,
            exp_avg_sq=self._state[2].tensor,
            target=lambda: self._parameter.tensor,
            noise_stream=NOISE_STREAM + index,
            offset=index % 2 * (2**32 - 700),  # so that the index of the noise wraps around inside of some
            resident=setting.resident,
            upper=None if self._upper is None else UpperHalves(self._upper.tensor),
        )

    def _moments(self, form: str) -> list[Array]:
        """exp_avg, exp_avg_sq; 8-bit ones with their scales."""
        first, second = self.case.old[1:]
        if form != "q8":
            return [narrow(first, form), narrow(second, form)]
        with np.errstate(all="ignore"):  # hostile ones may be negative, where training's are not
            return [eight_bit.written(first, eight_bit.EXP_AVG), eight_bit.written(abs(second), eight_bit.EXP_AVG_SQ)]

    def reference(self, setting: Setting) -> list[Array]:
        """What must become of 8-bit moments and all else."""
        case, shard = self.case, self.shard
        hyper = replace(cases.HYPERS[shard.group], l2=setting.l2)
        random = noise(case.length, shard.noise_stream, hyper.step, shard.offset)
        first, second = self._moments("q8")
        return list(eight_bit.step(case.old.master, first, second, case.gradient, setting.types[1], hyper, random))

    @cached_property
    def results(self) -> list[Array]:
        """master, exp_avg, exp_avg_sq, parameter."""
        found = [part.read(str(self.case)) for part in (*self._state, self._parameter)]
        if self.shard.upper is not None:
            upper = self.shard.upper.read().cpu().view(torch.uint16).numpy().copy()
            found[0] = join(upper, found[0])
        return found


def _placed(inputs: Sequence[Array], place: Place) -> list[Placed]:
    """Aligned every second time."""
    starts = [cases.STARTS[number // 2 % len(cases.STARTS)] if number % 2 else 0 for number in range(len(inputs))]
    return [Placed(one, start, place.device) for one, start in zip(inputs, starts, strict=True)]


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
    gradients = _placed(inputs, place)
    shards = _shards_of(inputs, form, resident=resident, place=place)
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


def _shards_of(inputs: Sequence[Array], form: str, *, resident: bool, place: Place) -> list[Shard]:
    """One for each gradient; nothing steps them."""
    nothing = torch.zeros(cases.LONGEST, device=place.device if resident else torch.device("cpu"))
    return [
        Shard(
            index=index, name=f"gradient {index}", group=0, numel=one.size, gradient_dtype=DTYPES[form],
            published_dtype=DTYPES[form], master=nothing, exp_avg=nothing, exp_avg_sq=nothing,
            target=lambda: nothing, resident=resident,
        )
        for index, one in enumerate(inputs)
    ]  # fmt: skip


def summed_by_link(place: Place, form: str) -> list[tuple[bytes, list[int], bool]]:
    """Every gradient of the battery: its bytes, its sums of bits, and whether those of one changed bit are others."""
    inputs = list(norm_inputs(form))
    tensors = _placed(inputs, place)
    flats = [one.tensor for one in tensors]
    link = place.open_link()
    try:
        sums = link.bit_sums.of(flats)
        assert not any(link.bit_sums.changed(sums, flats))
        place.synchronize()
        data = [one.read("what was summed").tobytes() for one in tensors]
        found = [sums_at(one, -(-len(raw) // 2048)) for one, raw in zip(sums, data, strict=True)]
        for number, flat in enumerate(flats):
            if len(flat):
                flat.view(torch.uint8)[number % flat.nbytes] ^= 1 << number % 8
        changed = link.bit_sums.changed(sums, flats)
    finally:
        link.close()
    return list(zip(data, found, changed, strict=True))


def sums_packed_by_link(place: Place, form: str) -> list[tuple[bytes, list[int]]]:
    """Likewise of those with elements, as the pack kernel sums them, piece by piece."""
    inputs = [one for one in norm_inputs(form) if one.size]
    gradients = _placed(inputs, place)
    shards = _shards_of(inputs, form, resident=False, place=place)
    for shard in shards:
        shard.keeps_gradient = shard.sums_gradient = True
    found = []
    with _buckets(place, shards) as (link, buckets):
        for bucket in buckets:
            ticket = link.pack(bucket, [gradients[piece.shard.index].tensor for piece in bucket.pieces])
            _await(ticket.completion)
            place.synchronize()
            for piece, sums in ticket.bit_sums.items():
                raw = inputs[piece.shard.index][piece.start : piece.start + piece.numel].tobytes()
                found.append((raw, sums_at(sums, -(-len(raw) // 2048))))
    return found


def sums_at(sums: Any, count: int) -> list[int]:
    """Where a launch has left them on the device."""
    begin = sums.address - sums.memory.data_ptr()
    words: list[int] = sums.memory[begin : begin + 8 * count].cpu().numpy().view(np.uint64).tolist()
    return words


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
                bucket.make_resident_work()
            else:
                link.attach(bucket)
                bucket.take_halves()
                bucket.work = native_work(bucket, None)
            bucket.present = [True] * len(bucket.pieces)
        yield link, buckets
    finally:
        link.close()


def pack(link: Any, bucket: Bucket, gradients: list[Tensor]) -> None:
    """Returns once they are packed and their sums are here."""
    _await(link.pack(bucket, gradients).completion)


def _step(link: Any, bucket: Bucket, setting: Setting) -> None:
    hyper = cases.HYPERS[bucket.group]
    work = bucket.resident_work or bucket.work
    work.freeze(**scalars_of(hyper), l2=setting.l2, steps=[hyper.step] * len(bucket.pieces))
    if bucket.resident:
        link.residency.step(bucket)
        return
    bucket.work.run_all(_native.Operation.step)
    _await(link.deliver(bucket, _native.Completion.already_done()))
    link.make_visible(bucket)


def _await(completion: _native.Completion) -> None:
    assert completion.wait(TIMEOUT), f"not done within {TIMEOUT:g} s"
