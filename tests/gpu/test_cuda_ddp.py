"""DistributedDataParallel over gloo, two ranks on one GPU: sums that come back late on a stream of gloo's own."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gpu_suite.given_gradients import Model, gradients_of
from superoffload import AdamW
from tests.support.rank_processes import on_ranks

STEPS = 6
CLIPS = 0.65  # every norm is a little larger
CYCLES = 20_000_000  # some 10 ms
Outcome = list[tuple[dict[str, str], list[float], float]]

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def in_rank(
    device: str, dtype: torch.dtype, speculation: str, late: bool = False
) -> tuple[dict[str, str], list[float], float]:
    """Digests, norms, and how much was speculated, of gradients that are given bit for bit and averaged over ranks.

    ``late``: sums are not yet on the device when their future is done.
    """
    model = Model(dtype, device)
    reduced = DistributedDataParallel(model, bucket_cap_mb=0.01)
    options: dict[str, Any] = {"lr": 1e-2, "bucket_numel": 2048, "threads": 1, "rank_timeout": 30.0}
    norms = []
    planted = mock.patch.object(default_hooks, "allreduce_hook", late_hook) if late else nullcontext()
    with planted, AdamW(model.parameters(), model=reduced, speculation=speculation, **options) as optimizer:
        for step in range(STEPS):
            optimizer.max_grad_norm = CLIPS if step % 2 else 1e6
            gradients = gradients_of(2 * step + dist.get_rank(), dtype, device)
            backward(reduced, gradients, aside=late)
            optimizer.step()
            norms.append(optimizer.grad_norm)
            optimizer.zero_grad()
        optimizer.synchronize()
        if device == "cuda":
            torch.cuda.synchronize()
        return optimizer.state_digests(), norms, optimizer.stats()["buckets_speculated"]


def backward(model: Any, gradients: list[Tensor], *, aside: bool) -> None:
    """``aside``: on a stream other than the default one, so that nothing but a wait orders it behind a late sum."""
    stream = torch.cuda.Stream() if aside else None
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model(gradients).backward()
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)


def late_hook(group: Any, bucket: Any) -> Any:
    """As gloo's threads do it, always too late: the sum is written behind a delay on the default stream."""
    buffer = allreduce_hook(group, bucket).wait()
    torch.cuda.synchronize()
    total = buffer.clone()
    buffer.fill_(torch.nan)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.default_stream()):
        sleep: Any = torch.cuda._sleep
        sleep(CYCLES)
        buffer.copy_(total)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


@cache
def reference(dtype: torch.dtype) -> Outcome:
    """Synchronous, on the CPU."""
    return on_ranks(2, in_rank, "cpu", dtype, "never")


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_averages_over_gloo_have_the_bits_of_the_cpu(device: str, dtype: torch.dtype) -> None:
    found, expected = on_ranks(2, in_rank, device, dtype, "always"), reference(dtype)
    assert [one[:2] for one in found] == [one[:2] for one in expected]
    assert all(speculated > 0 for _, _, speculated in found)
    assert found[0][1] == found[1][1] and min(found[0][1]) > CLIPS


@pytest.mark.gpu
def test_sums_that_are_late_are_waited_for() -> None:
    found = on_ranks(2, in_rank, "cuda", torch.float32, "always", True)
    assert [one[:2] for one in found] == [one[:2] for one in reference(torch.float32)]
