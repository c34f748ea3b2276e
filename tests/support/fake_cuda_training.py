"""Training of one small model over the fake driver, and what the same steps give on the host."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW
from superoffload.engine.bucket import Shard
from superoffload.engine.placement import move_state
from tests.support.adamw_training import model_of, train
from tests.support.fake_cuda import Fake, LateLink, on_fake_device, on_host
from tests.support.fake_memory import allocated


@contextmanager
def training(
    fake: Fake, *, model: nn.Module | None = None, link: dict[str, Any] | None = None, **options: Any
) -> Iterator[tuple[nn.Module, AdamW]]:
    """Two steps are done; parameters are read behind the current stream."""
    model = model_of(torch.bfloat16) if model is None else model
    model.register_forward_pre_hook(lambda *_: fake.synchronize())
    options = {"speculation": "always", "threads": 2, "bucket_numel": 1024, **options}
    with on_fake_device(fake, **(link or {})):
        optimizer = AdamW(model.parameters(), **options)
        try:
            train(model, optimizer, range(2))
            fake.synchronize()
            yield model, optimizer
        finally:
            optimizer.close()


@contextmanager
def moves_behind_the_stream(fake: Fake) -> Iterator[None]:
    """Python reads a real device's memory behind the current stream; the fake's it must wait for itself."""

    def move(shard: Shard, device: torch.device | None) -> None:
        fake.synchronize()
        move_state(shard, device)

    with mock.patch("superoffload.engine.layout.move_state", move):
        yield


@contextmanager
def quick_collections() -> Iterator[None]:
    """``gc.collect()`` looks only at what is made inside."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def host_digests(seeds: range, **options: Any) -> dict[str, str]:
    model = model_of(torch.bfloat16)
    with on_host(), AdamW(model.parameters(), threads=2, bucket_numel=1024, **options) as optimizer:
        train(model, optimizer, seeds)
        return optimizer.state_digests()


def state_of(digests: dict[str, str]) -> dict[str, str]:
    return {name: digest for name, digest in digests.items() if name != "published"}


def check_against_host(fake: Fake, code: Callable[[nn.Module, AdamW], None], **options: Any) -> None:
    """``code``, run after two steps, leaves the bits that it leaves on the host."""
    model: nn.Module = model_of(torch.bfloat16)
    with on_host(), AdamW(model.parameters(), threads=2, bucket_numel=1024) as host:
        train(model, host, range(2))
        code(model, host)
        expected = host.state_digests()
    with training(fake, **options) as (model, optimizer):
        code(model, optimizer)
        fake.synchronize()
        assert optimizer.state_digests() == expected


def accelerator_error(text: str, code: int | None = None) -> RuntimeError:
    """What the runtime says in a later call; ``code`` is the runtime's own."""
    made: Any = getattr(torch, "AcceleratorError", None)
    if made is None:
        pytest.skip("needs torch.AcceleratorError, which torch has since 2.8")
    error: RuntimeError = made(text)
    if code is not None:
        vars(error)["error_code"] = code
    return error


def out_of_memory(of_allocator: bool) -> RuntimeError:
    if of_allocator:
        return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return accelerator_error("CUDA error: out of memory", 2)


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
