"""How much memory of the device parameters on their way up may take: what no step so far has used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from superoffload import AdamW
from tests.adamw_tools import batch, train
from tests.cuda_tools import blocks_of, out_of_memory, training
from tests.fake_cuda import Fake, LateLink, allocated, on_fake_device, on_host
from tests.test_cuda_link import LATE, deep_model, steps


def digests_with(fake: Fake, at_step: Callable[[int, LateLink, AdamW], None], **options: Any) -> dict[str, str]:
    model = deep_model(torch.bfloat16)
    model.register_forward_pre_hook(lambda *_: fake.synchronize())
    options = {"speculation": "always", "threads": 2, "bucket_numel": 1024, **options}
    with on_fake_device(fake) as links, AdamW(model.parameters(), **options) as optimizer:
        for seed in range(6):
            optimizer.zero_grad()
            batch(model, seed).backward()
            at_step(seed, links[0], optimizer)
            optimizer.step()
        fake.synchronize()
        assert fake.mismatches == 0
        return optimizer.state_digests()


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    model = deep_model(torch.bfloat16)
    with on_host(), AdamW(model.parameters(), speculation="always", threads=2, bucket_numel=1024) as optimizer:
        steps(model, optimizer)
        return optimizer.state_digests()


def test_the_first_step_shows_the_peak_without_them(fake: Fake, expected: dict[str, str]) -> None:
    used: list[int] = []
    assert digests_with(fake, lambda seed, link, optimizer: used.append(blocks_of(optimizer))) == expected
    assert used[0] == 0 and len(set(used[1:])) == 1 and used[1] > 0


@pytest.mark.parametrize("room", [0, 100, 5000, 10_000])
def test_no_more_than_there_was_room_for(fake: Fake, expected: dict[str, str], room: int) -> None:
    used: list[int] = []

    def look(seed: int, link: LateLink, optimizer: AdamW) -> None:
        link.fake_device.free = room if seed == 0 else 1 << 30  # looked at behind the first step only
        used.append(blocks_of(optimizer))

    fake.delays(1, LATE)
    assert digests_with(fake, look) == expected
    assert max(used) <= room
    fits = 2 * (2048 + 512)  # a bucket's block, and its gradients: a matrix and perhaps a bias
    assert room < fits or min(used[1:]) > room - fits, "all of the room but what no bucket fits into"


def test_a_larger_step_has_none_and_shows_what_it_leaves(fake: Fake, expected: dict[str, str]) -> None:
    used: list[int] = []

    def look(seed: int, link: LateLink, optimizer: AdamW) -> None:
        device = link.fake_device
        if seed == 2:
            device.memory.take(1 << 29)  # of forward, in the next step
            device.free = 8000
        elif seed == 3:
            device.memory.give(1 << 29)
        used.append(blocks_of(optimizer))

    assert digests_with(fake, look) == expected
    assert [blocks > 0 for blocks in used] == [False, True, True, False, True, True]
    assert used[1] > 8000 >= used[4] == used[5]


@pytest.mark.parametrize("room_for", [0.5, 1.0])
def test_what_fits_without_them_fits_with_them(fake: Fake, room_for: float) -> None:
    """Sequences become longer; with the longest there is memory left for ``room_for`` of all gradients."""
    model = deep_model(torch.bfloat16)
    gradients = sum(allocated(param.numel() * param.element_size()) for param in model.parameters())
    activations = [1, 1, 2, 2, 4, 4, 4]  # times all gradients
    used: list[int] = []
    with on_fake_device(fake) as links:

        def born(param: Tensor) -> None:
            assert param.grad is not None
            links[0].fake_device.memory.take_gradient(param.grad)

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(born)
        with AdamW(model.parameters(), speculation="always", threads=1, bucket_numel=1024) as optimizer:
            device = links[0].fake_device
            memory = device.memory
            memory.prompt = True
            train(model, optimizer, [9])  # memory that stays
            links[0]._blocks._active = 0  # not measured yet
            device.capacity = memory.active + int((max(activations) + room_for) * gradients)
            memory.peak = memory.active
            for seed, length in enumerate(activations):
                optimizer.zero_grad()
                memory.take(length * gradients)
                batch(model, seed).backward()
                memory.give(length * gradients)
                used.append(blocks_of(optimizer))
                optimizer.step()
                fake.synchronize()
                assert memory.peak <= device.capacity, seed
    assert used[4] == 0, "sequences have become longer"
    assert used[3] > 0
    assert used[-1] == used[-2] > 0, "of what the longest leave"


@pytest.mark.parametrize("of_allocator", [True, False])
def test_memory_that_is_refused_is_done_without(fake: Fake, expected: dict[str, str], of_allocator: bool) -> None:
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
                    raise out_of_memory(of_allocator)
                return real(nbytes)

            device.empty = empty  # type: ignore[method-assign]  # refuses memory in its place
        used.append(blocks_of(optimizer))

    fake.delays(2, LATE)
    assert digests_with(fake, look) == expected
    assert allocations == 4, "asked no more"
    assert used[1] > used[2] > 0 and not any(used[3:])


def test_an_error_that_is_not_about_memory_is_told(fake: Fake) -> None:
    with training(fake, model=deep_model(torch.bfloat16)) as (model, optimizer):
        link: Any = optimizer._core.link
        optimizer.zero_grad()
        with (
            mock.patch.object(link.fake_device, "empty", side_effect=RuntimeError("CUDA error: launch failed")),
            pytest.raises(RuntimeError, match=r"packing .*launch failed"),
        ):
            batch(model, 2).backward()


@pytest.mark.parametrize("setting", ["keep_grads", "unasked", "no kernels"])
def test_where_gradients_leave_nothing(fake: Fake, expected: dict[str, str], setting: str) -> None:
    used: list[int] = []

    def look(seed: int, link: LateLink, optimizer: AdamW) -> None:
        link.fake_device.reusing = setting == "unasked"
        used.append(blocks_of(optimizer))

    options: dict[str, Any] = {"keep_grads": True} if setting == "keep_grads" else {}
    if setting == "no kernels":
        with mock.patch("tests.fake_cuda.IMAGE", b""):
            assert digests_with(fake, look) == expected
    else:
        assert digests_with(fake, look, **options) == expected
    assert not any(used)
