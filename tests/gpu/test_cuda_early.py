"""New parameters that travel before the verdict: that they do, and whose memory they take."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.gpu_suite.devices import Device, open_device
from benchmarks.gpu_suite.races import deterministic
from superoffload import AdamW
from superoffload.links.cuda.blocks import early_buckets
from superoffload.links.cuda.device import TorchDevice, active_bytes, peak_active_bytes

devices = pytest.mark.parametrize("device", ["stand-in", pytest.param("cuda", marks=pytest.mark.gpu)])
STEPS = 6
EARLY = 2 * 256 * 256 * 10  # bytes in a step: twelve buckets but the last two
_LONG = 200_000_000  # cycles of a device's clock, about a tenth of a second


def alike(count: int = 12) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(count) for layer in (nn.Linear(256, 256, bias=False), nn.Tanh())))


def trained(device: Device, speculation: str, *, on_side: bool = False) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """Digests of every step; each waits until all that may has gone up. Every other one is then taken back, since the
    learning rate changes."""
    device.start_of_peaks()  # another test may have filled the device, and what is unused at the peak has room
    model = alike().to(device=device.torch, dtype=torch.bfloat16)
    digests = []
    expected = 0  # bytes
    options: dict[str, Any] = {"lr": 1e-3, "threads": 2, "bucket_numel": 256 * 256, "speculation": speculation}
    with deterministic(), device.links(), AdamW(model.parameters(), **options) as optimizer:
        device.prepare(model)
        for step in range(STEPS):
            x = torch.randn(64, 256, generator=torch.Generator().manual_seed(step)).to(device.torch).bfloat16()
            loss = model(x).float().square().mean()
            if on_side:
                side = torch.cuda.Stream(device.torch)
                side.wait_stream(torch.cuda.current_stream(device.torch))
                with torch.cuda.stream(side):
                    loss.backward()
                torch.cuda.current_stream(device.torch).wait_stream(side)
            else:
                loss.backward()
            if step and speculation == "always":
                expected += wait_until_sent(optimizer, expected)
            optimizer.param_groups[0]["lr"] *= 0.9 if step % 2 else 1.0
            optimizer.step()
            optimizer.zero_grad()
            device.catch_up()
            digests.append(optimizer.state_digests())
        return digests, optimizer.stats()


def wait_until_sent(optimizer: AdamW, before: int) -> int:
    """Waits until all that was speculated in this step and may go up early has done so; returns its bytes. A bucket
    whose journal overflowed in the step before is not speculated."""
    speculated = [bucket for bucket in early_buckets(optimizer._engine.buckets) if bucket.running is not None]
    sent = sum(2 * bucket.numel for bucket in speculated)
    until = time.monotonic() + 10.0
    while optimizer.stats()["bytes_up_early"] != before + sent:
        assert time.monotonic() < until, f"{optimizer.stats()['bytes_up_early'] - before} bytes were sent of {sent}"
        time.sleep(0.001)
    return sent


@devices
def test_what_was_stepped_goes_up_before_the_verdict(device: str) -> None:
    """In all steps but the first, from speculated buckets but the last two of backward, with the same bits."""
    opened = open_device(device)
    digests, stats = trained(opened, "always")
    assert digests == trained(opened, "never")[0]
    assert EARLY * (STEPS - 1) // 2 < stats["bytes_up_early"] <= EARLY * (STEPS - 1)
    assert stats["buckets_undone"] > 0 and stats["buckets_committed"] > 0


@pytest.mark.gpu
def test_backward_on_another_stream() -> None:
    opened = open_device("cuda")
    assert trained(opened, "always", on_side=True)[0] == trained(opened, "never")[0]


@pytest.mark.gpu
def test_the_peak_is_that_of_ordinary_training() -> None:
    """Parameters, activations and all gradients; ours are the two staging slots, sums and tables besides."""
    opened = open_device("cuda")

    def backward(model: nn.Module) -> None:
        x = torch.randn(4096, 256, device=opened.torch).bfloat16()
        model(x).float().square().mean().backward()

    ordinary = alike(48).to(device=opened.torch, dtype=torch.bfloat16)
    backward(ordinary)
    ordinary.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = active_bytes()
    backward(ordinary)
    torch.cuda.synchronize()
    expected = peak_active_bytes() - before
    del ordinary
    model = alike(48).to(device=opened.torch, dtype=torch.bfloat16)
    with opened.links(), AdamW(model.parameters(), bucket_numel=256 * 256, speculation="always") as optimizer:
        for _ in range(3):
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
        assert len(early_buckets(optimizer._engine.buckets)) == 46
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = active_bytes()
        for _ in range(5):
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        assert peak_active_bytes() - before <= expected + (1 << 20)  # sums of bits
        assert optimizer.stats()["bytes_up_early"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("on_side", [True, False], ids=["side", "default"])
def test_memory_is_used_again_behind_the_stream_that_is_named(on_side: bool) -> None:
    """Memory of a third stream, which goes while the named one still reads it."""
    device = TorchDevice(torch.device("cuda"))
    third = torch.cuda.Stream()
    reader = torch.cuda.Stream() if on_side else torch.cuda.default_stream()
    result = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    with torch.cuda.stream(third):
        memory = torch.ones(1 << 20, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    sleep: Any = torch.cuda._sleep
    with torch.cuda.stream(reader):
        sleep(_LONG)
        result.copy_(memory)
    device.release([memory], int(reader.cuda_stream))
    del memory
    with torch.cuda.stream(third):
        again = [torch.full((1 << 20,), 7, dtype=torch.uint8, device="cuda") for _ in range(4)]
    torch.cuda.synchronize()
    assert bool((result == 1).all()) and len(again) == 4
