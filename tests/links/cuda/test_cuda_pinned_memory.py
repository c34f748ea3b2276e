"""Pinned host memory: reserved once, accounted for, given back; and memory that driver, device or host refuse."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from superoffload import AdamW
from superoffload.errors import DeviceError
from superoffload.links.cuda import pinned
from tests.support.adamw_training import train
from tests.support.fake_cuda import Fake, on_fake_device, on_host
from tests.support.fake_cuda_training import host_digests, training


def test_pinned_memory_refused(fake: Fake) -> None:
    """It goes on with ordinary memory, and says so once per piece of memory."""
    fake.registrable(4096)
    with (
        pytest.warns(RuntimeWarning, match=r"refused to pin .*memlock"),
        training(fake) as (model, optimizer),
    ):
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


def test_no_copy_crosses_a_registration(fake: Fake) -> None:
    """The fake refuses copies that do."""
    with training(fake, link={"chunk": 8192}) as (model, optimizer):
        assert fake.calls("cuMemHostRegister_v2") > 3
        train(model, optimizer, range(2, 5))
        fake.synchronize()
        assert optimizer.state_digests() == host_digests(range(5))


# ---- memory that is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("refusals", [1, 3])
def test_memory_that_is_refused_when_buckets_are_laid_out_anew(fake: Fake, refusals: int) -> None:
    """After the first step buckets follow the observed order. The step is done; no gradient is lost afterwards."""

    def shuffled() -> nn.Module:
        torch.manual_seed(0)
        return nn.ModuleList([nn.Linear(24, 24) for _ in range(3)])

    def backward(model: Any, seed: int) -> None:
        values = torch.randn(4, 24, generator=torch.Generator().manual_seed(seed))
        for index in (1, 0, 2):  # not in the order of registration
            values = model[index](values)
        values.square().mean().backward()

    model = shuffled()
    with on_host(), AdamW(model.parameters(), threads=1, bucket_numel=1024) as host:
        for seed in range(3):
            host.zero_grad()
            backward(model, seed)
            host.step()
        expected = host.state_digests()
    model = shuffled()
    with on_fake_device(fake) as links, AdamW(model.parameters(), threads=1, bucket_numel=1024) as optimizer:
        backward(model, 0)
        optimizer.step()
        fake.synchronize()
        assert optimizer.stats()["steps"] == 1
        links[0].fake_device.refused = refusals
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


def test_a_group_whose_memory_is_refused_is_stepped_once_there_is_some(fake: Fake) -> None:
    def made() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(0)
        return nn.Linear(8, 8), nn.Linear(8, 8)

    def step(first: nn.Module, second: nn.Module, optimizer: AdamW, seed: int) -> None:
        optimizer.zero_grad()
        second(first(torch.full((2, 8), 0.1 * seed))).square().mean().backward()
        optimizer.step()

    digests = []
    for refused in (0, 2):
        first, second = made()
        with on_fake_device(fake) as links, AdamW(first.parameters(), threads=1) as optimizer:
            step(first, second, optimizer, 1)
            fake.synchronize()
            links[0].fake_device.refused = refused
            for name in ("weight", "bias"):
                group = {"params": [getattr(second, name)]}
                if refused:
                    with pytest.raises(DeviceError, match="out of memory"):
                        optimizer.add_param_group(group)
                else:
                    optimizer.add_param_group(group)
            for seed in (2, 3):
                step(first, second, optimizer, seed)
                fake.synchronize()
            digests.append(optimizer.state_digests())
    assert digests[0] == digests[1]


def test_host_memory_that_is_refused_is_a_device_error(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise MemoryError

    with training(fake) as (_, optimizer):
        link = optimizer._engine.link
        monkeypatch.setattr("superoffload.links.cuda.link.PinnedArena", refuse)
        with pytest.raises(DeviceError, match="the host is out of memory; close other programs"):
            link.prepare(optimizer._engine.buckets, anew=False)


class Memory(bytearray):
    """Stands for pinned memory, with one registration for all of it."""

    chunk = 1 << 36


@pytest.mark.parametrize("nbytes", [1 << 20, (1 << 20) - 256, 3 << 20, 1000])
def test_an_arena_of_what_its_arrays_take_has_room_for_all_of_them(nbytes: int) -> None:
    """Also where it is used again for other buckets that fill it; large arrays start at different lines."""
    sizes = [nbytes] * 7
    total = sum(map(pinned.taken, sizes))
    with mock.patch("superoffload._native.PinnedMemory", lambda bytes, **_: Memory(bytes)):
        arena = pinned.PinnedArena(mock.Mock(pci_bus_id="0000:00:00.0"), total)
    for _ in range(2):
        arrays = [arena.take(size, torch.uint8) for size in sizes]
        starts = [array.data_ptr() - arrays[0].data_ptr() for array in arrays]
        assert all(begin + nbytes <= end for begin, end in pairwise(starts))
        if nbytes >= 1 << 20:
            assert len({start % 4096 for start in starts}) == 7
        arena.reset()
