"""ZeRO-3 partitions whose state stays on a device, over the fake driver: packed and stepped there, however late."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from superoffload.engine.bucket import GroupHyper, Shard
from superoffload.engine.options import EngineOptions
from superoffload.engine.verdict import decide
from superoffload.errors import DeviceError
from superoffload.integrations.deepspeed.driver import Partition, PartitionDriver
from superoffload.links.cuda.link import CudaOptions
from tests.support.fake_cuda import IMAGE, Fake, FakeDevice, LateLink
from tests.support.fake_cuda_training import LATE

SIZES = (3000, 1000, 0, 500, 2100)
HYPER = GroupHyper(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, l2=False, bias_correction=True)


def partitions(resident: frozenset[int]) -> list[Partition]:
    """One sub-group each."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for index, numel in enumerate(SIZES):
        master = torch.randn(numel, generator=generator)
        published, gradient = master.to(torch.bfloat16), torch.zeros(numel + 1, dtype=torch.bfloat16)
        dtypes, moments = (torch.bfloat16, torch.bfloat16), (torch.zeros(numel), torch.zeros(numel))
        target = partial(torch.Tensor.detach, published)
        shard = Shard(index, f"{index}", 0, numel, *dtypes, master, *moments, target, resident=index in resident)
        found.append(Partition(index, index, shard, gradient[:numel], gradient))
    return found


def gradient_of(step: int, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + index)
    return (torch.randn(SIZES[index], generator=generator) * (0.01 if step % 2 else 1.0)).to(torch.bfloat16)


def driver_of(link: LateLink | None, resident: frozenset[int], speculation: str) -> PartitionDriver:
    options = EngineOptions(speculation, 1024, [-1, -1])
    return PartitionDriver(partitions(resident), len(SIZES), options, lambda group: HYPER, pin=False, accelerator=link)


def late_link(fake: Fake) -> LateLink:
    options = CudaOptions(keep_grads=True, image=IMAGE, timeout_seconds=60.0, library=fake.library)
    return LateLink(FakeDevice(fake), options)


def train(fake: Fake | None, resident: frozenset[int], speculation: str) -> tuple[dict[str, str], int]:
    """Six steps with clips, a window of two gradients whose first looked final, and one that is not finite."""
    link = None if fake is None else late_link(fake)
    driver = driver_of(link, resident, speculation)
    for step in range(6):
        for micro in range(2 if step == 3 else 1):
            for index in reversed(range(len(SIZES))):
                if fake is not None:
                    fake.synchronize()  # where a device's own copies would queue up, Python writes at once
                incoming = gradient_of(step + 50 * micro, index)
                if step == 4 and index == 0:
                    incoming[7] = float("inf")
                driver.final(driver.take(index, incoming), unscale=1.0, max_grad_norm=5.0)
        window = driver.close_window(lambda key: True)
        driver.step(decide(window.sums.values(), max_grad_norm=5.0), later=False)
        if fake is not None:
            fake.synchronize()
    digests, on_device = driver.engine.digests(), int(driver.engine.stats()["params_on_device"])
    driver.close()
    if fake is not None and link is not None:
        for stream in link.roles.values():
            fake.synchronize(stream)
    return digests, on_device


@pytest.mark.parametrize(
    ("resident", "speculation"),
    [(frozenset({0, 1}), "always"), (frozenset({2, 4}), "never")],
    ids=str,
)
def test_bits_of_host_memory(fake: Fake, resident: frozenset[int], speculation: str) -> None:
    expected, _ = train(None, frozenset(), speculation)
    fake.delays(3, LATE)
    digests, on_device = train(fake, resident, speculation)
    assert digests == expected
    assert on_device == sum(SIZES[index] for index in resident)


def test_a_graph_capture_is_refused(fake: Fake) -> None:
    link = late_link(fake)
    driver = driver_of(link, frozenset({0}), "always")
    link.fake_device.capturing = True
    with pytest.raises(DeviceError, match="CUDA graph"):
        driver.final(driver.take(0, gradient_of(0, 0)), unscale=1.0, max_grad_norm=None)
    link.fake_device.capturing = False
    driver.close()
