"""State on a device, over the fake driver: the bits of the host link, however late the device is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from superoffload import AdamW
from superoffload.engine.bucket import Bucket, Shard
from superoffload.engine.native_work import shared_journals
from superoffload.engine.placement import move_state
from superoffload.errors import DeviceError, KernelsUnavailable, StateError, TornStep
from tests.support.adamw_training import batch, model_of
from tests.support.fake_cuda import Fake, on_fake_device
from tests.support.fake_cuda_training import moves_behind_the_stream, out_of_memory
from tests.support.link_runs import LATE, deep_model, run_on_host

HALF = {"gpu_fraction": 0.5}


@pytest.fixture(autouse=True)
def _moves(fake: Fake) -> Iterator[None]:
    with moves_behind_the_stream(fake):
        yield


def steps(model: nn.Module, optimizer: AdamW, seeds: range = range(6)) -> None:
    for seed in seeds:
        optimizer.zero_grad()
        batch(model, seed, scale=0.01 if seed == 2 else 1.0).backward()
        if seed == 4:
            optimizer.zero_grad()
            batch(model, 40, scale=float("inf")).backward()
        optimizer.step()


def run_on_fake(
    fake: Fake, dtype: torch.dtype, placement: Any, *, link: dict[str, Any] | None = None, **options: Any
) -> tuple[dict[str, str], dict[str, float | int]]:
    with on_fake_device(fake, **(link or {})):
        model = model_of(dtype)
        model.register_forward_pre_hook(lambda *_: fake.synchronize())
        options = {"speculation": "always", "threads": 2, "bucket_numel": 1024, "placement": placement, **options}
        with AdamW(model.parameters(), **options) as optimizer:
            steps(model, optimizer)
            fake.synchronize()
            return optimizer.state_digests(), optimizer.stats()


@pytest.mark.parametrize("options", [{}, {"keep_grads": True}], ids=str)
def test_bits_of_the_host_link(fake: Fake, options: dict[str, Any]) -> None:
    expected, on_host = run_on_host(steps, torch.bfloat16, max_grad_norm=0.5)
    for seed, placement in enumerate((HALF, {"gpu_fraction": 1.0})):
        fake.delays(seed, LATE)
        digests, stats = run_on_fake(fake, torch.bfloat16, placement, max_grad_norm=0.5, **options)
        assert digests == expected, placement
        assert stats["params_on_device"] > 0
        assert stats["bytes_down"] < on_host["bytes_down"]
        assert stats["bytes_up"] < on_host["bytes_up"]
    assert fake.mismatches == 0


def test_state_on_the_device_reserves_no_memory_for_journals(fake: Fake) -> None:
    reserved: list[int] = []

    def watched(buckets: Sequence[Bucket], sizes: Sequence[int]) -> Any:
        reserved.extend(size for bucket, size in zip(buckets, sizes, strict=True) if bucket.resident)
        assert all(size > 0 for bucket, size in zip(buckets, sizes, strict=True) if not bucket.resident)
        return shared_journals(buckets, sizes)

    with mock.patch("superoffload.engine.layout.shared_journals", watched):
        _, half = run_on_fake(fake, torch.bfloat16, HALF)
        assert reserved and not any(reserved)
        _, whole = run_on_fake(fake, torch.bfloat16, {"gpu_fraction": 1.0})
    assert whole["journal_reserved_bytes"] == 0 and whole["host_bytes"] < half["host_bytes"] // 2


@pytest.mark.parametrize(("later", "earlier"), [("pack", "current"), ("current", "pack")])
def test_a_missing_wait_changes_the_result(fake: Fake, later: str, earlier: str) -> None:
    """The pack kernel waits for the gradients, and for the step before, which read what it writes. A step waits for it,
    and so does backward before it uses the memory of freed gradients again."""

    def run(seed: int | None) -> dict[str, str]:
        with on_fake_device(fake) as links:
            model = deep_model(torch.bfloat16)
            model.register_forward_pre_hook(lambda *_: fake.synchronize())
            options: dict[str, Any] = {"placement": {"gpu_fraction": 1.0}, "max_grad_norm": 0.5, "threads": 1}
            with AdamW(model.parameters(), bucket_numel=1024, **options) as optimizer:
                if seed is not None:
                    fake.delays(seed, LATE)
                    fake.drop_waits(links[0].roles[later], links[0].roles[earlier])
                for step in range(4):
                    optimizer.zero_grad()
                    batch(model, step).backward()
                    optimizer.step()
                for stream in links[0].roles.values():
                    fake.synchronize(stream)
                return optimizer.state_digests()

    expected = run(None)
    assert any(run(seed) != expected for seed in range(6))


def _failing(fake: Fake, launches: int) -> tuple[AdamW, nn.Module]:
    """After two steps and a backward; the device refuses launches from now on, after so many."""
    model = deep_model(torch.float32)
    model.register_forward_pre_hook(lambda *_: fake.synchronize())
    optimizer = AdamW(model.parameters(), placement={"gpu_fraction": 1.0}, threads=1, bucket_numel=1024)
    _three_steps(model, optimizer, fake, launches)
    return optimizer, model


def _three_steps(model: nn.Module, optimizer: AdamW, fake: Fake | None = None, launches: int = 0) -> None:
    for seed in range(3):
        optimizer.zero_grad()
        batch(model, seed).backward()
        if seed < 2 or fake is None:
            optimizer.step()
    if fake is not None:
        fake.synchronize()
        fake.fail("cuLaunchKernel", 2, 1 + launches)  # the first one compares bits


def test_a_refused_launch_abandons_the_step(fake: Fake) -> None:
    with on_fake_device(fake):
        optimizer, model = _failing(fake, 0)
        with optimizer:
            with pytest.raises(DeviceError, match="its step on the device could not be launched"):
                optimizer.step()
            fake.reset()
            assert optimizer.stats()["steps"] == 2
            optimizer.zero_grad()
            batch(model, 2).backward()
            optimizer.step()
            fake.synchronize()
            found = optimizer.state_digests()
    model = deep_model(torch.float32)
    with AdamW(model.parameters(), threads=1) as expected:
        _three_steps(model, expected)
        assert found == expected.state_digests()


def test_a_device_that_fails_in_the_middle_leaves_the_optimizer_unusable(fake: Fake) -> None:
    with on_fake_device(fake):
        optimizer, _ = _failing(fake, 3)
        with pytest.raises(TornStep, match="make a new optimizer and load the last checkpoint"):
            optimizer.step()
        fake.reset()
        with pytest.raises(StateError, match="cannot be trusted"):
            optimizer.step()
        optimizer.close()


def test_a_device_that_fails_behind_a_launch_is_not_a_step_that_never_was(fake: Fake) -> None:
    """The kernel runs, so the step is not abandoned; and its memory is not given back, since nothing tells when."""
    with on_fake_device(fake) as links:
        optimizer, _ = _failing(fake, 1 << 30)
        fake.reset()
        fake.fail("cuEventRecord", 2, 1)  # the first one is behind the comparison of bits
        with pytest.raises(TornStep, match=r"was launched, but the device failed behind it.*load the last checkpoint"):
            optimizer.step()
        fake.reset()
        with pytest.raises(StateError, match="cannot be trusted"):
            optimizer.step()
        assert links[0].residency is not None and not links[0].residency.drain(0.0)
        optimizer.close()


def test_state_that_finds_no_room_stays_where_it_was(fake: Fake) -> None:
    """The first step's order asks for other parameters; some of them cannot be moved to the device."""
    expected, _ = run_on_host(steps, torch.float32, max_grad_norm=0.5)
    moved: list[str] = []

    def move(shard: Shard, device: torch.device | None) -> None:
        if device is not None and moved:
            raise out_of_memory(of_allocator=True)
        fake.synchronize()
        move_state(shard, device)
        moved.append(shard.name)

    with mock.patch("superoffload.engine.layout.move_state", move), on_fake_device(fake):
        model = model_of(torch.float32)
        model.register_forward_pre_hook(lambda *_: fake.synchronize())
        options: dict[str, Any] = {"speculation": "always", "threads": 2, "bucket_numel": 1024, "max_grad_norm": 0.5}
        with (
            mock.patch("superoffload.engine.placement.Placer.choose_first", lambda placer, sizes: set()),
            AdamW(model.parameters(), placement={"gpu_fraction": 1.0}, **options) as optimizer,
        ):
            steps(model, optimizer)
            fake.synchronize()
            assert optimizer.state_digests() == expected
            placement = optimizer.placement
            assert placement is not None and len(moved) == 1
            assert "the accelerator had no room left for" in placement["why"]
            assert 0 < placement["params_on_device"] < sum(p.numel() for p in model.parameters())


def test_without_kernels_it_is_refused(fake: Fake) -> None:
    model = model_of(torch.float32)
    with (
        on_fake_device(fake, image=b""),
        mock.patch("superoffload.engine.placement._on_cpu", lambda params: False),
        pytest.raises(KernelsUnavailable, match=r"placement=\{'gpu_fraction': 0.5\}: .*make NVRTC available"),
    ):
        AdamW(model.parameters(), placement=HALF)
