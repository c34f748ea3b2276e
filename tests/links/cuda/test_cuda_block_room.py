"""How much memory of the device parameters on their way up may take: what no step so far has used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW
from superoffload.links.cuda.blocks import early_buckets
from tests.support.adamw_training import batch, train
from tests.support.fake_cuda import Fake, LateLink, on_fake_device
from tests.support.fake_cuda_training import LATE, blocks_of, count_gradients, deep_model, out_of_memory, run, training
from tests.support.fp32_gradients import needs_grad_dtype


def digests_with(fake: Fake, at_step: Callable[[int, LateLink, AdamW], None], **options: Any) -> dict[str, str]:
    def program(model: nn.Module, optimizer: AdamW) -> None:
        link: Any = optimizer._engine.link
        for seed in range(6):
            optimizer.zero_grad()
            batch(model, seed).backward()
            at_step(seed, link, optimizer)
            optimizer.step()

    found = run(program, make=deep_model, fake=fake, **options)
    assert fake.mismatches == 0
    return found.digests


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    return run(train, make=deep_model).digests


def test_no_more_than_there_was_room_for(fake: Fake, expected: dict[str, str]) -> None:
    used: list[int] = []
    room = 10_000

    def look(seed: int, link: LateLink, optimizer: AdamW) -> None:
        link.fake_device.free = room if seed == 0 else 1 << 30  # looked at behind the first step only
        used.append(blocks_of(optimizer))

    fake.delays(1, LATE)
    assert digests_with(fake, look) == expected
    room //= 2  # of which half is for larger steps
    assert used[0] == 0, "the first step shows the peak without them"
    assert max(used) <= room
    assert min(used[1:]) > room - 2048 - 128, "all of the room but what no bucket fits into"


def counted(fake: Fake, lengths: list[float], room: float) -> list[int]:
    """Bytes of blocks per step, on a device whose memory ends ``room`` above what is always there: it is never full.
    ``lengths``: of each step, what forward leaves; in units of all gradients, as ``room`` is."""
    model = deep_model(torch.bfloat16)
    used: list[int] = []
    with on_fake_device(fake) as links:
        unit = count_gradients(model, links)
        with AdamW(model.parameters(), speculation="always", threads=1, bucket_numel=1024) as optimizer:
            device = links[0].fake_device
            memory = device.memory
            memory.prompt = True
            device.capacity = 1 << 40
            device.capacity = memory.active + int(room * unit)
            for seed, length in enumerate(lengths):
                optimizer.zero_grad()
                memory.take(int(length * unit))
                batch(model, seed).backward()
                memory.give(int(length * unit))
                used.append(blocks_of(optimizer))
                optimizer.step()
                fake.synchronize()
                assert memory.peak <= device.capacity, f"step {seed}"
    return used


def test_steps_that_become_larger_find_memory(fake: Fake) -> None:
    plenty = counted(fake, [2] * 3, room=9)
    assert plenty[0] == 0 and plenty[1] == plenty[2] > 0
    used = counted(fake, [2, 2, 3, 3.9, 3.9, 2], room=4.6)
    assert plenty[1] == used[1] >= used[2] >= used[3] > used[4] == used[5] > 0


def test_gradients_that_come_again_show_no_peak(fake: Fake) -> None:
    """The last layer is run twice, so that its gradient is taken back when it is the only one so far."""
    model = deep_model(torch.bfloat16)
    model.register_forward_pre_hook(lambda *_: fake.synchronize())
    last: Any = list(model.parameters())[-2]
    list(model.parameters())[-1].requires_grad_(False)
    with on_fake_device(fake), AdamW(model.parameters(), speculation="always", bucket_numel=128) as optimizer:
        for seed in range(3):
            optimizer.zero_grad()
            for _ in range(2):
                batch(model, seed).backward(inputs=[last])
            assert blocks_of(optimizer) == 0
            batch(model, seed).backward()
            assert (blocks_of(optimizer) > 0) == (seed > 0)
            optimizer.step()


@needs_grad_dtype
def test_passes_whose_sums_are_made_on_the_host_have_none(fake: Fake) -> None:
    """The forwards behind them need the memory. What the last pass gives is added, and packed no more."""
    with training(fake, model=deep_model(torch.bfloat16), accumulate_dtype="fp32") as (model, optimizer):
        link: Any = optimizer._engine.link
        for number in range(3):
            optimizer.zero_grad()
            with mock.patch.object(link, "has_room", return_value=False), optimizer.accumulate():
                batch(model, number).backward()
            assert optimizer._engine.is_filling and blocks_of(optimizer) == 0
            batch(model, 7 + number).backward()
            optimizer.step()
        assert early_buckets(optimizer._engine.buckets)


def test_memory_that_is_refused_is_done_without(fake: Fake, expected: dict[str, str]) -> None:
    used: list[int] = []
    allocations = 0

    def look(seed: int, link: LateLink, optimizer: AdamW) -> None:
        device = link.fake_device
        if seed == 1:
            real = device.empty

            def empty(nbytes: int) -> Tensor:
                nonlocal allocations
                allocations += 1
                if allocations == 4:
                    raise out_of_memory()
                return real(nbytes)

            device.empty = empty  # type: ignore[method-assign]  # a full device
        used.append(blocks_of(optimizer))

    fake.delays(2, LATE)
    assert digests_with(fake, look) == expected
    assert allocations == 4, "asked no more"
    assert used[1] > used[2] > 0 and not any(used[3:])


def test_an_error_that_is_not_about_memory_is_told(fake: Fake) -> None:
    with training(fake, model=deep_model(torch.bfloat16)) as (model, optimizer):
        link: Any = optimizer._engine.link
        optimizer.zero_grad()
        with (
            mock.patch.object(link.fake_device, "empty", side_effect=RuntimeError("CUDA error: launch failed")),
            pytest.raises(RuntimeError, match=r"packing .*launch failed"),
        ):
            batch(model, 2).backward()


@pytest.mark.parametrize("setting", ["keep_grads", "unasked"])
def test_where_gradients_leave_nothing(fake: Fake, expected: dict[str, str], setting: str) -> None:
    used: list[int] = []

    def look(seed: int, link: LateLink, optimizer: AdamW) -> None:
        link.fake_device.reusing = setting == "unasked"
        used.append(blocks_of(optimizer))

    assert digests_with(fake, look, keep_grads=True if setting == "keep_grads" else None) == expected
    assert not any(used)
