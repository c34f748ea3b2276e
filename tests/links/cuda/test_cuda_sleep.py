"""Sleep over the fake driver: pinned memory and memory of the device are given back, and all bits stay."""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

import pytest

from superoffload.errors import DeviceError, HostMemoryError, StateError
from superoffload.host.memory import refused
from tests.support.adamw_training import train
from tests.support.fake_cuda import Fake
from tests.support.fake_cuda_training import LATE, host_digests, out_of_memory, quick_collections, training

PLACED = {"gpu_fraction": 0.5}


@pytest.mark.parametrize(
    ("norm", "options"),
    [(None, {"placement": PLACED}), (0.05, {"master_dtype": "split"})],
    ids=str,
)
def test_a_loop_has_the_bits_of_the_host(fake: Fake, norm: float | None, options: dict[str, Any]) -> None:
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
    with quick_collections(), training(fake, placement=PLACED, master_dtype="split") as (model, optimizer):
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
    with training(fake, placement=PLACED) as (model, optimizer):
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
