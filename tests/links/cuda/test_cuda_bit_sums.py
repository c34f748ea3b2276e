"""Sums of bits on a device: taken in stream order, for many tensors at once, in bounded memory, and what goes wrong."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from superoffload import AdamW
from superoffload.errors import DeviceError
from superoffload.links.cuda.bit_sums import CudaBitSums
from superoffload.links.cuda.link import CudaLink, CudaOptions
from superoffload.optimizer.tracked_param import TrackedParam
from tests.support.adamw_training import batch, model_of, train
from tests.support.device_battery import sums_at
from tests.support.fake_cuda import IMAGE, Fake, FakeDevice, on_fake_device, on_host
from tests.support.fake_cuda_training import LATE, taken_back, training
from tests.support.fp32_gradients import add_to_main_grad
from tests.support.reference.bit_sums import bit_sums

pytestmark = pytest.mark.filterwarnings("ignore:superoffload. .* changed without autograd's version counters")

LATER = 100_000.0  # microseconds that a stream is behind the program


@contextmanager
def summing(fake: Fake, timeout_seconds: float = 30.0) -> Iterator[tuple[CudaBitSums, FakeDevice]]:
    device = FakeDevice(fake)
    options = CudaOptions(image=IMAGE, timeout_seconds=timeout_seconds, library=fake.library)
    link = CudaLink(device, options)
    try:
        assert isinstance(link.bit_sums, CudaBitSums)
        yield link.bit_sums, device
    finally:
        link.close()


def values_of(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).bfloat16()


def words(tensor: Tensor) -> list[int]:
    return bit_sums(tensor.view(torch.uint8).numpy().tobytes())


def test_tables_are_used_again_and_never_too_early(fake: Fake) -> None:
    with summing(fake) as (sums, _):
        tensors = [values_of(2500, seed) for seed in range(40)]
        fake.sleep(LATER)
        taken = [one for tensor in tensors for one in sums.of([tensor])]  # the stream is far behind
        fake.synchronize()
        assert [sums_at(one, 3) for one in taken] == [words(tensor) for tensor in tensors]
        tables = len(sums.arenas)
        assert 1 < tables <= 8
        for _ in range(30):
            assert not any(sums.changed(taken, tensors))
        assert len(sums.arenas) == tables
        fake.sleep(LATER)
        last = sums.of(tensors[:1])
    assert all(table.is_free() for table in sums._tables)
    assert sums_at(last[0], 3) == words(tensors[0]), "tables are read before the link is closed"


def test_no_room_and_a_device_that_does_not_answer_or_has_failed_are_errors(fake: Fake) -> None:
    with summing(fake, timeout_seconds=0.05) as (sums, device):
        tensor = values_of(100, 0)
        device.refused = 1
        with pytest.raises(DeviceError, match=r"noticing edits: .*no room on the device"):
            sums.of([tensor])
        taken = sums.of([tensor])
        fake.sleep(600_000.0)
        with pytest.raises(DeviceError, match="SUPEROFFLOAD_DEVICE_TIMEOUT"):
            sums.changed(taken, [tensor])
        fake.synchronize()
        assert sums.changed(taken, [tensor]) == [False]
        fake.breaks(700)
        with pytest.raises(DeviceError, match="ILLEGAL_ADDRESS"):
            sums.changed(taken, [tensor])


# ---- whole optimizers -----------------------------------------------------------------------------------------------


def written(fake: Fake, *, waits: bool) -> set[str]:
    """Names of parameters that count as written by others in three steps without any such write."""
    found: set[str] = set()
    refreshed = mock.patch.object(TrackedParam, "refresh_master", lambda tracked: found.add(tracked.shard.name))
    with on_fake_device(fake) as links, refreshed, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        model = model_of(torch.bfloat16)
        with AdamW(model.parameters(), threads=2, bucket_numel=1024, lr=0.1) as optimizer:
            roles = links[0].roles
            if not waits:
                fake.drop_waits(roles["current"], roles["up"])
            for seed in range(3):
                fake.delays(seed, LATE)
                if not waits:
                    fake.sleep(LATER, roles["up"])
                train(model, optimizer, [seed])
            fake.synchronize(roles["up"])
            optimizer.synchronize()
    return found


def test_sums_of_parameters_are_of_what_was_delivered(fake: Fake) -> None:
    """Behind the copies of their delivery: without that wait, they are of the old values."""
    assert written(fake, waits=True) == set()
    assert written(fake, waits=False) != set()


def halved(parameter: Any, told: bool) -> None:
    if told:
        with torch.no_grad():
            parameter.mul_(0.5)
    else:
        parameter.data.mul_(0.5)


@pytest.mark.parametrize("steps", [2, 15])
def test_writes_that_leave_no_trace_count(fake: Fake, steps: int) -> None:
    """Of plain parameters over the link, in the steps in which those on a device are compared: the third and 16th."""
    digests = []
    for told in (True, False):
        with training(fake) as (model, optimizer), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(model, optimizer, range(2, steps))
            fake.synchronize()
            halved(next(model.parameters()), told)
            train(model, optimizer, range(2))
            fake.synchronize()
            digests.append(optimizer.state_digests())
            assert sum("version counters" in str(one.message) for one in caught) == (not told)
    assert digests[0] == digests[1]


def with_main_grads(fake: Fake, *, edited: bool, host: bool = False) -> tuple[dict[str, str], int]:
    """Digests, and how many gradients were taken back; Megatron's main_grad, halved behind backward."""
    model = model_of(torch.bfloat16)
    model.register_forward_pre_hook(lambda *_: fake.synchronize())
    parameters: list[Any] = list(model.parameters())
    for parameter in parameters:
        parameter.main_grad = torch.zeros(parameter.shape)
        parameter.register_post_accumulate_grad_hook(add_to_main_grad)
    options: dict[str, Any] = {"speculation": "always", "threads": 2, "bucket_numel": 4096}
    with on_host() if host else on_fake_device(fake), taken_back() as again, AdamW(parameters, **options) as optimizer:
        batch(model, 0).backward()
        fake.synchronize()
        if edited:
            parameters[0].main_grad.data.mul_(0.5)
        optimizer.step()
        fake.synchronize()
        return optimizer.state_digests(), len(again)


def test_edits_of_gradients_that_are_kept_are_seen_in_what_was_packed(fake: Fake) -> None:
    """No version counter shows them; their sums come from the kernel that packs them."""
    plain, edited = with_main_grads(fake, edited=False), with_main_grads(fake, edited=True)
    assert (plain[1], edited[1]) == (0, 1)
    assert edited[0] == with_main_grads(fake, edited=True, host=True)[0] != plain[0]


def test_a_step_is_done_also_where_there_is_no_room_for_sums(fake: Fake) -> None:
    """Then the values count as unknown: a write that follows is kept, and nothing else changes."""

    def digests(synchronize: Callable[[], None], refuse: Callable[[AdamW], None]) -> dict[str, str]:
        model = model_of(torch.bfloat16)
        model.register_forward_pre_hook(lambda *_: synchronize())
        with AdamW(model.parameters(), threads=2) as optimizer:
            train(model, optimizer, [0])
            optimizer.zero_grad()
            batch(model, 1).backward()
            refuse(optimizer)
            optimizer.step()
            assert optimizer.stats()["steps"] == 2
            synchronize()
            halved(next(model.parameters()), told=False)
            train(model, optimizer, [2])
            synchronize()
            return optimizer.state_digests()

    with on_host():
        expected = digests(lambda: None, lambda optimizer: None)
    with on_fake_device(fake) as links:

        def refuse(_: AdamW) -> None:
            links[0].fake_device.refused = 1

        assert digests(fake.synchronize, refuse) == expected
        assert links[0].fake_device.refused == 0
