"""Edits on a device are noticed with one wait and one launch per step, however many parameters there are."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from superoffload.links.cuda.bit_sums import CudaBitSums
from tests.support.fake_cuda import Fake, on_fake_device
from tests.support.rank_processes import flat_mesh, net, on_ranks, optimizer_of, shard, tokens_of


class Waits(TorchDispatchMode):
    """Counts what would make the program wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "equal", "nonzero", "is_nonzero", "unique2", "masked_select"):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


KERNELS = ("sum_bits", "compare_bits")


def noticing_of_a_step(layers: int, keep_grads: bool) -> list[tuple[list[str], int, list[int]]]:
    """In a rank, of every step: what torch waits for, how often sums are compared, how often kernels are launched."""
    fake = Fake()
    found = []
    compared = mock.patch.object(CudaBitSums, "changed", autospec=True, side_effect=CudaBitSums.changed)
    with on_fake_device(fake, keep_grads=keep_grads), compared as asked:
        model = shard(net(torch.bfloat16, layers=layers), flat_mesh())
        model.register_forward_pre_hook(lambda *_: fake.synchronize())
        with optimizer_of(model, rank_check="off", keep_grads=keep_grads or None) as optimizer:
            for step in range(3):
                optimizer.zero_grad()
                asked.reset_mock()
                before = [fake.calls(kernel) for kernel in KERNELS]
                model.loss(tokens_of(step, dist.get_rank())).backward()
                fake.synchronize()
                with Waits() as waits:
                    optimizer.step()
                launches = [fake.calls(kernel) - count for kernel, count in zip(KERNELS, before, strict=True)]
                found.append((waits.seen, asked.call_count, launches))
    fake.synchronize()
    return found


@pytest.mark.parametrize("keep_grads", [False, True])
def test_a_step_waits_and_launches_once_however_many_parameters_there_are(keep_grads: bool) -> None:
    """Sums of kept gradients come from the kernel that packs them."""
    Fake()  # compiled here, not by two ranks at once
    for layers in (1, 4):
        for steps in on_ranks(2, noticing_of_a_step, layers, keep_grads):
            assert steps == [([], 1, [1, 1])] * 3


def test_what_counts_waits_counts_them() -> None:
    with Waits() as waits:
        assert torch.ones(3).sum().item() == 3.0
        assert torch.equal(torch.ones(2), torch.ones(2))
    assert waits.seen == ["_local_scalar_dense", "equal"]
