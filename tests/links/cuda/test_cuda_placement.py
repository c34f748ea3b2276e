"""State on a device, over the fake driver: the bits of the host link, however late the device is. Sleep gives all of
its memory back."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from superoffload import AdamW
from superoffload.engine.bucket import Shard
from superoffload.engine.placement import move_state, placer_for
from superoffload.errors import DeviceError, HostMemoryError, KernelsUnavailable, StateError, TornStep
from superoffload.host.memory import refused
from superoffload.links.host import HostLink
from tests.support.adamw_training import batch, train
from tests.support.fake_cuda import Fake
from tests.support.fake_cuda_training import (
    LATE,
    deep_model,
    host_digests,
    out_of_memory,
    quick_collections,
    run,
    training,
)

HALF = {"gpu_fraction": 0.5}


@contextmanager
def ready(fake: Fake) -> Iterator[tuple[nn.Module, AdamW]]:
    """After two steps and a backward."""
    options: dict[str, Any] = {"placement": {"gpu_fraction": 1.0}, "threads": 1}
    with training(fake, model=deep_model(torch.float32), **options) as (model, optimizer):
        optimizer.zero_grad()
        batch(model, 2).backward()
        fake.synchronize()
        yield model, optimizer


def test_a_refused_launch_abandons_the_step(fake: Fake) -> None:
    with ready(fake) as (model, optimizer):
        stats = optimizer.stats()
        assert stats["params_on_device"] and stats["journal_reserved_bytes"] == stats["bytes_down"] == 0
        fake.fail("cuLaunchKernel", 2, 1)  # the first one compares bits
        with pytest.raises(DeviceError, match="its step on the device could not be launched"):
            optimizer.step()
        fake.reset()
        assert optimizer.stats()["steps"] == 2
        train(model, optimizer, [2])
        fake.synchronize()
        found = optimizer.state_digests()
    model = deep_model(torch.float32)
    with AdamW(model.parameters(), threads=1) as expected:
        train(model, expected, range(3))
        assert found == expected.state_digests()


def test_a_device_that_fails_in_the_middle_leaves_the_optimizer_unusable(fake: Fake) -> None:
    """A kernel that was launched runs, so the step is not abandoned; nor is its memory given back."""
    error = r"was launched, but the device failed behind it.*load the last checkpoint"
    with ready(fake) as (_, optimizer):
        fake.fail("cuEventRecord", 2, 1)  # the first one is of the comparison of bits
        with pytest.raises(TornStep, match=error):
            optimizer.step()
        fake.reset()
        with pytest.raises(StateError, match="cannot be trusted"):
            optimizer.step()
        link: Any = optimizer._engine.link
        assert not link.residency.drain(0.0)


def test_state_that_finds_no_room_stays_where_it_was(fake: Fake) -> None:
    """The first step's order asks for other parameters; some of them cannot be moved to the device."""
    expected = run(train, torch.float32, max_grad_norm=0.5)
    moved: list[str] = []

    def move(shard: Shard, device: torch.device | None) -> None:
        if device is not None and moved:
            raise out_of_memory()
        move_state(shard, device)
        moved.append(shard.name)

    def program(model: nn.Module, optimizer: AdamW) -> None:
        train(model, optimizer)
        placement = optimizer.placement
        assert placement is not None and len(moved) == 1
        assert "the accelerator had no room left for" in placement["why"]
        assert 0 < placement["params_on_device"] < sum(p.numel() for p in model.parameters())

    with (
        mock.patch("superoffload.engine.layout.move_state", move),
        mock.patch("superoffload.engine.placement.Placer.choose_first", lambda placer, sizes: set()),
    ):
        found = run(program, torch.float32, fake=fake, max_grad_norm=0.5, placement={"gpu_fraction": 1.0})
    assert found.digests == expected.digests


def test_without_kernels_it_is_refused() -> None:
    elsewhere = [torch.empty(3, device="meta")]
    with pytest.raises(KernelsUnavailable, match=r"placement=\{'gpu_fraction': 0.5\}: .*make NVRTC available"):
        placer_for(0.5, HostLink(), elsewhere)


@pytest.mark.parametrize(("norm", "options"), [(None, {"placement": HALF}), (0.05, {"master_dtype": "split"})], ids=str)
def test_a_loop_that_sleeps_has_the_bits_of_the_host(fake: Fake, norm: float | None, options: dict[str, Any]) -> None:
    masters = {key: value for key, value in options.items() if key != "placement"}
    expected = host_digests(range(6), max_grad_norm=norm, **masters)
    fake.delays(int(norm is None), LATE)
    with training(fake, max_grad_norm=norm, **options) as (model, optimizer):
        for number in range(2, 6):
            optimizer.sleep()
            optimizer.wake()
            train(model, optimizer, [number])
        fake.synchronize()
        assert optimizer.state_digests() == expected
    assert fake.mismatches == 0


def test_pinned_memory_and_memory_of_the_device_are_given_back(fake: Fake) -> None:
    with quick_collections(), training(fake, placement=HALF, master_dtype="split") as (model, optimizer):
        link: Any = optimizer._engine.link
        device, asleep, awake = link.fake_device, set(), []
        for number in range(2, 7):
            train(model, optimizer, [number])
            optimizer.zero_grad()
            fake.synchronize()
            gc.collect()
            awake.append((optimizer.stats()["pinned_bytes"], fake.registered_bytes()))
            optimizer.sleep()
            gc.collect()
            stats = optimizer.stats()
            assert stats["pinned_bytes"] < awake[-1][0] // 2
            assert stats["pinned_bytes"] == link._flag.nbytes + sum(one.nbytes for one in link._kernel_sums.arenas)
            assert fake.registered_bytes() < awake[-1][1]
            assert not link._staging and not link._on_device
            asleep.add((fake.registered_bytes(), stats["host_bytes"], stats["params_on_device"]))
            device_bytes = device.memory.active
            optimizer.wake()
            assert device.memory.active > device_bytes
        assert len(asleep) == 1  # nothing grows
        assert len(set(awake[1:])) == 1


def test_host_or_device_without_room_at_wake_leaves_it_asleep(fake: Fake) -> None:
    with training(fake, placement=HALF) as (model, optimizer):
        before, placed = optimizer.state_digests(), optimizer.stats()["params_on_device"]
        assert placed > 0
        optimizer.sleep()
        gc.collect()
        pinned = fake.registered_bytes()
        with (
            mock.patch("superoffload.engine.layout.shared_journals", side_effect=refused(1 << 30, "a test")),
            pytest.raises(HostMemoryError, match=r"wake\(\): .*still asleep"),
        ):
            optimizer.wake()
        assert (fake.registered_bytes(), optimizer.stats()["params_on_device"]) == (pinned, 0)
        with (
            mock.patch("superoffload.engine.layout.move_state", side_effect=out_of_memory()),
            pytest.raises(DeviceError, match=r"wake\(\): .*no room on the device.*still asleep"),
        ):
            optimizer.wake()
        with pytest.raises(StateError, match="asleep"):
            optimizer.step()
        optimizer.wake()
        fake.synchronize()
        assert (optimizer.state_digests(), optimizer.stats()["params_on_device"]) == (before, placed)
        train(model, optimizer, range(2, 4))
        fake.synchronize()
        assert optimizer.state_digests() == host_digests(range(4))
