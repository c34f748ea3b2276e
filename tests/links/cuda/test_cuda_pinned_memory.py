"""Pinned host memory: reserved once, accounted for, given back; and memory that driver, device or host refuse."""

from __future__ import annotations

import gc
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW
from superoffload.errors import DeviceError, StateError
from superoffload.links.cuda import link as cuda_link
from superoffload.links.cuda.pinned import free_bytes, node_of
from tests.support.adamw_training import batch, train
from tests.support.fake_cuda import Fake, garbage_like, on_fake_device
from tests.support.fake_cuda_training import (
    blocks_of,
    branches,
    deep_model,
    host_digests,
    quick_collections,
    run,
    training,
)
from tests.support.fp32_gradients import add_to_main_grad

BEHIND = 1_700_000.0  # microseconds: less than as many waits of a link as there are buckets


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with quick_collections():
        yield


def test_pinned_memory_refused(fake: Fake) -> None:
    """It goes on with ordinary memory, and says so once per piece of memory. Nor does a copy cross registrations, which
    the fake refuses."""
    with training(fake, link={"chunk": 4096}) as (model, optimizer):
        assert fake.calls("cuMemHostRegister_v2") > 3
        train(model, optimizer, range(2, 5))
        fake.synchronize()
        assert optimizer.state_digests() == host_digests(range(5))
    fake.registrable(4096)
    with pytest.warns(RuntimeWarning, match=r"refused to pin .*memlock"), training(fake) as (model, optimizer):
        assert optimizer.stats()["pinned_bytes"] == 4096, "the flag"
        fake.delays(1, 1000)
        train(model, optimizer, range(2, 5))
        fake.synchronize()
        assert optimizer.state_digests() == host_digests(range(5))


def test_pinned_memory_is_reserved_once_and_given_back(fake: Fake) -> None:
    before = fake.registered_bytes()
    with training(fake) as (model, optimizer):
        reserved = fake.registered_bytes()
        assert reserved > before
        train(model, optimizer, range(2, 6))
        assert fake.registered_bytes() == reserved
        pinned_bytes = optimizer.stats()["pinned_bytes"]
        assert 0 <= reserved - before - pinned_bytes < 2 * 4096, "whole pages of the flag and the buckets"
        assert pinned_bytes > 2 * 4 * sum(p.numel() for p in model.parameters()), "packed gradients and shadows"
        assert fake.calls("cuMemHostRegister_v2") == 3, "the flag, all buckets together, a table"
        optimizer.close()
        assert (fake.registered_bytes(), optimizer.stats()["pinned_bytes"]) == (before, 0)


# ---- on which node --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cpulists", "device_node", "expected"),
    [
        (["0-7", "8-15"], 1, 1),  # next to the second socket
        (["0-7"], None, -1),  # one node: no choice
        (["0-71", ""], 1, 0),  # a Superchip: node 1 is the device's own memory
    ],
)
def test_the_node_of_a_device(tmp_path: Path, cpulists: list[str], device_node: int | None, expected: int) -> None:
    """By folders as the system shows them."""
    nodes, pci = tmp_path / "nodes", tmp_path / "pci"
    for i, cpus in enumerate(cpulists):
        (nodes / f"node{i}").mkdir(parents=True)
        (nodes / f"node{i}" / "cpulist").write_text(cpus + "\n")
        (nodes / f"node{i}" / "meminfo").write_text(f"Node {i} MemTotal: 2048 kB\nNode {i} MemFree: 1024 kB\n")
    (pci / "0000:17:00.0").mkdir(parents=True)
    if device_node is not None:
        (pci / "0000:17:00.0" / "numa_node").write_text(f"{device_node}\n")
    assert node_of("0000:17:00.0".upper(), pci, nodes) == expected
    assert free_bytes(0, nodes) == 1 << 20
    assert free_bytes(9, nodes) == 0


# ---- memory that a device may still use ------------------------------------------------------------------------------


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


def test_a_device_that_is_stuck_is_waited_for_once_per_step(fake: Fake) -> None:
    """And for as long as any other, once it is well again; blocks that it has not given back go then."""
    with early(fake, timeout_seconds=0.6) as (model, optimizer, link):
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


def test_what_reads_state_does_not_wait_forever_for_a_device_that_is_stuck(fake: Fake) -> None:
    with training(fake, link={"timeout_seconds": 0.6}) as (model, optimizer):
        saved = optimizer.state_dict()
        link: Any = optimizer._engine.link
        fake.sleep(BEHIND, link.roles["up"])
        train(model, optimizer, [2])
        with pytest.raises(StateError, match=r"did not finish its copies within 0.6 s.*SUPEROFFLOAD_DEVICE_TIMEOUT"):
            optimizer.load_state_dict(saved)
        fake.synchronize()
        optimizer.load_state_dict(saved)


def test_sums_of_bits_that_a_failed_packing_writes(fake: Fake) -> None:
    """The kernel runs although the call behind its launch was refused; the sums' memory is freed with the error."""
    model = deep_model(torch.bfloat16)
    params: list[Any] = list(model.parameters())
    for param in params:
        param.main_grad = torch.zeros_like(param)  # as Megatron adds it
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
            fake.fail("cuEventRecord", 2, 1)  # behind the launch: the first is in front of it
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


def test_host_memory_that_is_refused_is_a_device_error(fake: Fake) -> None:
    with (
        training(fake) as (_, optimizer),
        mock.patch.object(cuda_link, "PinnedArena", side_effect=MemoryError),
        pytest.raises(DeviceError, match="the host is out of memory; close other programs"),
    ):
        optimizer._engine.link.prepare(optimizer._engine.buckets, anew=False)


def test_memory_that_is_refused_when_buckets_are_laid_out_anew(fake: Fake) -> None:
    """After the first step buckets follow the observed order. The step is done; no gradient is lost afterwards."""

    def backward(model: nn.Module, seed: int) -> None:
        model(torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))).square().mean().backward()

    def program(model: nn.Module, optimizer: AdamW) -> None:
        for seed in range(3):
            optimizer.zero_grad()
            backward(model, seed)
            optimizer.step()

    expected = run(program, torch.float32, branches).digests
    model = branches(torch.float32)
    with on_fake_device(fake) as links, AdamW(model.parameters(), threads=1, bucket_numel=1024) as optimizer:
        backward(model, 0)
        optimizer.step()
        fake.synchronize()
        assert optimizer.stats()["steps"] == 1
        links[0].fake_device.refused = 3
        with pytest.raises(DeviceError, match="out of memory"):  # now what was packed is not needed any more
            optimizer.zero_grad()
        for seed in (1, 2):
            while True:
                optimizer.zero_grad()
                fake.synchronize()
                try:
                    backward(model, seed)
                    break
                except DeviceError as error:
                    assert "out of memory" in str(error)
            optimizer.step()
        fake.synchronize()
        assert links[0].fake_device.refused == 0
        assert optimizer.state_digests() == expected
