"""Code over the fake driver (tests/support/fake_cuda.py), and what it gives on the host."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from superoffload import AdamW
from superoffload.engine.bucket import Shard
from superoffload.engine.engine import Engine
from tests.support.adamw_training import model_of, train
from tests.support.fake_cuda import Fake, FakeDevice, LateLink, allocated, on_fake_device, on_host

LATE = 1500  # microseconds: up to so much later than enqueued; a step of these models takes about as long
OPTIONS: dict[str, Any] = {"speculation": "always", "threads": 2, "bucket_numel": 1024}
NEEDED_AGAIN = "packed and freed during backward, and then needed again"

Program = Callable[[Any, AdamW], Any]
MakeModel = Callable[[torch.dtype], nn.Module]


# ---- models ---------------------------------------------------------------------------------------------------------


def deep_model(dtype: torch.dtype) -> nn.Sequential:
    """Of a dozen buckets, more than there are staging slots."""
    torch.manual_seed(0)
    layers = [layer for _ in range(10) for layer in (nn.Linear(32, 32), nn.Tanh())]
    return nn.Sequential(nn.Linear(16, 32), *layers, nn.Linear(32, 4)).to(dtype)


def wide_model(dtype: torch.dtype) -> nn.Sequential:
    """Each of its larger gradients spans four buckets."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 16), nn.Linear(16, 4)).to(dtype)


class Branches(nn.ModuleList):
    """Gradients come not in the order of registration, so that buckets are laid out anew after the first step."""

    def forward(self, values: Tensor) -> Tensor:
        for index in (1, 0, 2):
            layer: Any = self[index]
            values = layer(values.to(layer.weight.dtype))
        return values


def branches(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return Branches([nn.Linear(24, 24), nn.Linear(16, 24), nn.Linear(24, 4)]).to(dtype)


# ---- programs -------------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """What a program has returned and left. ``messages``: its warnings."""

    found: Any
    digests: dict[str, str]
    stats: dict[str, float | int]
    messages: list[str]

    @property
    def bits(self) -> tuple[Any, dict[str, str]]:
        return self.found, self.digests


def run(
    program: Program,
    dtype: torch.dtype = torch.bfloat16,
    make: MakeModel = model_of,
    *,
    fake: Fake | None = None,
    link: dict[str, Any] | None = None,
    **options: Any,
) -> Run:
    """Over the fake device, or on the host. A forward reads parameters behind the current stream."""
    model = make(dtype)
    if fake is not None:
        model.register_forward_pre_hook(lambda *_: fake.synchronize())
    with (
        on_host() if fake is None else on_fake_device(fake, **(link or {})),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        with AdamW(model.parameters(), **{**OPTIONS, **options}) as optimizer:
            found = seen(program(model, optimizer))
            if fake is not None:
                fake.synchronize()
            return Run(found, optimizer.state_digests(), optimizer.stats(), [str(one.message) for one in caught])


def seen(value: Any) -> Any:
    """As it is now, to be compared with ==."""
    if isinstance(value, Tensor):
        value = value.detach().clone()
        return value.dtype, tuple(value.shape), value.flatten().view(torch.uint8).tolist()
    return [seen(one) for one in value] if isinstance(value, (list, tuple)) else value


def host_digests(seeds: range, **options: Any) -> dict[str, str]:
    return run(partial(train, seeds=seeds), **options).digests


def state_of(digests: dict[str, str]) -> dict[str, str]:
    return {name: digest for name, digest in digests.items() if name != "published"}


@contextmanager
def training(
    fake: Fake, *, model: nn.Module | None = None, link: dict[str, Any] | None = None, **options: Any
) -> Iterator[tuple[nn.Module, AdamW]]:
    """Two steps are done; parameters are read behind the current stream."""
    model = model_of(torch.bfloat16) if model is None else model
    model.register_forward_pre_hook(lambda *_: fake.synchronize())
    with on_fake_device(fake, **(link or {})):
        optimizer = AdamW(model.parameters(), **{**OPTIONS, **options})
        try:
            train(model, optimizer, range(2))
            fake.synchronize()
            yield model, optimizer
        finally:
            optimizer.close()


# ---- what happens inside --------------------------------------------------------------------------------------------


@contextmanager
def taken_back() -> Iterator[list[str]]:
    """The shards of which a gradient was taken back inside."""
    names: list[str] = []
    retract = Engine.retract

    def counted(engine: Engine, shard: Shard) -> None:
        names.append(shard.name)
        retract(engine, shard)

    with mock.patch.object(Engine, "retract", counted):
        yield names


@contextmanager
def free_bytes(nbytes: int) -> Iterator[list[str]]:
    """On the device; yields the shards of which something was added in host memory."""
    names: list[str] = []
    add = Engine.add

    def counted(engine: Engine, shard: Shard, addend: Tensor, **options: Any) -> None:
        assert not shard.resident, "its packed gradient is on the device"
        names.append(shard.name)
        add(engine, shard, addend, **options)

    with mock.patch.object(FakeDevice, "free_bytes", lambda _: nbytes), mock.patch.object(Engine, "add", counted):
        yield names


@contextmanager
def quick_collections() -> Iterator[None]:
    """``gc.collect()`` looks only at what is made inside."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def out_of_memory() -> RuntimeError:
    """Of the allocator."""
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def blocks_of(optimizer: AdamW) -> int:
    """Bytes of memory for early parameters, now (superoffload/links/cuda/blocks.py)."""
    link: Any = optimizer._engine.link
    return int(link._blocks._used)


def count_gradients(model: nn.Module, links: list[LateLink]) -> int:
    """Has the stand-in's allocator count the gradients of ``model``; returns the bytes of all of them together."""

    def born(param: Tensor) -> None:
        assert param.grad is not None
        links[0].fake_device.memory.take_gradient(param.grad)

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(born)
    return sum(allocated(param.numel() * param.element_size()) for param in model.parameters())
