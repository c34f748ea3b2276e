"""Memory that a device may still use when a call has failed, or the link is closed: it stays until that is over."""

from __future__ import annotations

import gc
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW
from superoffload.errors import DeviceError
from superoffload.links.cuda import link as cuda_link
from tests.support.adamw_training import batch
from tests.support.fake_cuda import Fake, garbage_like
from tests.support.fake_cuda_training import blocks_of, quick_collections, training
from tests.support.fp32_gradients import add_to_main_grad
from tests.support.link_runs import deep_model

OUT_OF_MEMORY = 2
BEHIND = 1_700_000.0  # microseconds: less than as many waits of a link as there are buckets


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with quick_collections():
        yield


@contextmanager
def early(fake: Fake, **link: Any) -> Iterator[tuple[nn.Module, AdamW, Any]]:
    """Two steps are done; the next one has blocks."""
    with training(fake, model=deep_model(torch.bfloat16), link=link) as (model, optimizer):
        optimizer.zero_grad()
        yield model, optimizer, optimizer._engine.link


def packed_into_blocks(model: nn.Module, link: Any, seed: int) -> list[Any]:
    """After a backward whose gradients are spoiled, all copies up are asked for; the blocks' memory."""
    handle = next(model.parameters()).register_hook(lambda gradient: gradient * torch.nan)
    batch(model, seed).backward()
    handle.remove()
    for bucket in link._blocks._held:
        bucket.running.wait()
    return [weakref.ref(block.memory) for block in link._blocks._held.values()]


# ---- a call that fails ----------------------------------------------------------------------------------------------


def test_a_device_that_is_stuck_is_waited_for_once_per_step(fake: Fake) -> None:
    """And for as long as any other, once it is well again; blocks that it has not given back go then."""
    with early(fake, timeout_seconds=0.2) as (model, optimizer, link):
        before = optimizer.state_digests()
        asked = fake.calls("cuMemcpyHtoDAsync_v2")
        fake.sleep(BEHIND, link.roles["up"])
        kept = packed_into_blocks(model, link, 2)
        assert len(kept) > 8
        assert fake.calls("cuMemcpyHtoDAsync_v2") > asked
        optimizer.step()
        assert optimizer.stats()["skipped_steps"] == 1
        assert any(memory() is not None for memory in kept), "the device may write there; waited for once per bucket?"
        fake.synchronize(link.roles["up"])
        assert optimizer.state_digests() == before and fake.mismatches == 0
        optimizer.zero_grad()
        loss = batch(model, 2)
        fake.sleep(100_000, link.roles["pack"])  # as backward of a larger model keeps it
        loss.backward()
        optimizer.step()
        fake.synchronize()
        assert blocks_of(optimizer) == 0 and fake.mismatches == 0
        gc.collect()
        assert not any(memory() is not None for memory in kept)
        optimizer.zero_grad()
        fake.sleep(100_000, link.roles["up"])  # late, and in time
        packed_into_blocks(model, link, 3)
        optimizer.step()
        assert optimizer.stats()["skipped_steps"] == 2 and blocks_of(optimizer) == 0


def test_sums_of_bits_that_a_failed_packing_writes(fake: Fake) -> None:
    """The kernel runs although the call behind its launch was refused; the sums' memory is freed with the error."""
    model = deep_model(torch.bfloat16)
    for param in model.parameters():
        param.main_grad = torch.zeros_like(param)  # type: ignore[attr-defined]  # as Megatron adds it
        param.register_post_accumulate_grad_hook(add_to_main_grad)
    with training(fake, model=model) as (_, optimizer):
        link: Any = optimizer._engine.link
        optimizer.zero_grad()
        made: list[tuple[weakref.ref[Tensor], int]] = []
        real = link._kernel_sums.room

        def room(counts: Any) -> Any:
            found = real(counts)
            made.append((weakref.ref(found[0].memory), found[0].address))
            fake.sleep(50_000, link.roles["pack"])
            fake.fail("cuEventRecord", OUT_OF_MEMORY, 1)  # behind the launch: the first is in front of it
            return found

        link._kernel_sums.room = room
        with pytest.raises(DeviceError, match="CUDA_ERROR_OUT_OF_MEMORY") as caught:
            batch(model, 2).backward()
        error: BaseException | None = caught.value
        while error is not None:  # whose frames hold it
            traceback.clear_frames(error.__traceback__)
            error = error.__cause__
        gc.collect()
        ((memory, address),) = made
        assert memory() is None
        for stream in link.roles.values():
            fake.synchronize(stream)
        (owned,) = (tensor for tensor in link.fake_device.kept if tensor.data_ptr() == address)
        assert torch.equal(owned, garbage_like(owned)), "what its next owner has written"


# ---- a link that is closed ------------------------------------------------------------------------------------------


class StillBusy:
    """A pipeline that says so when it is closed; the native one says so after five seconds."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipeline, name)

    def close(self, *, keep_kernels: bool) -> bool:
        self._pipeline.close(keep_kernels=keep_kernels)
        return False


def test_blocks_that_are_in_use_when_the_link_is_closed(fake: Fake, leaked: list[object]) -> None:
    with early(fake) as (model, _, link):
        kept = packed_into_blocks(model, link, 2)
        link._pipeline = StillBusy(link._pipeline)
        link.close()
        gc.collect()
        assert kept and all(memory() is not None for memory in kept)
        assert any(isinstance(one, Tensor) and one is kept[0]() for one in leaked)
        assert all(any(one is held for one in leaked) for held in (link._residency, link._kernel_sums))


def test_sums_that_are_taken_when_the_link_is_closed(
    fake: Fake, leaked: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tables stay, and so do the kernels."""
    monkeypatch.setattr(cuda_link, "_STEPS_SECONDS", 0.01)
    with training(fake) as (_, optimizer):
        link: Any = optimizer._engine.link
        sums = link._kernel_sums
        fake.sleep(1_000_000)
        ones = torch.ones(5000)
        taken = sums.of([ones])
        unloaded = fake.calls("cuModuleUnload")
        link.close()
        assert fake.calls("cuModuleUnload") == unloaded
        assert any(one is sums for one in leaked)
        fake.synchronize()
        del taken, ones


def test_kernels_go_with_a_link_that_nothing_uses(fake: Fake, leaked: list[object]) -> None:
    with training(fake) as (_, optimizer):
        fake.synchronize()
        optimizer.close()
        assert fake.calls("cuModuleUnload") == 1
        assert leaked == []


@pytest.fixture
def leaked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What links leave for ever, in this test."""
    found: list[object] = []
    monkeypatch.setattr(cuda_link, "_LEAKED", found)
    return found
