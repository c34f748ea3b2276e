"""Edits of gradients and parameters are noticed without reading a device once per tensor, or everything twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from superoffload import AdamW
from superoffload.links.cuda.bit_sums import CudaBitSums
from tests.fake_cuda import Fake, LateLink, on_fake_device
from tests.rank_tools import flat_mesh, net, on_ranks, optimizer_of, shard, tokens_of
from tests.test_ranks_replicated import loss_of

# ---- fully_shard on a device ----------------------------------------------------------------------------------------

Train = Callable[[Any, AdamW, Callable[[], None]], None]


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


def grads_of(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def clipped(model: Any, optimizer: AdamW) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def negated(model: Any, optimizer: AdamW) -> None:
    torch._foreach_neg_(grads_of(model))


def values_negated(model: Any, optimizer: AdamW) -> None:
    torch._foreach_neg_([p for p in model.parameters() if p.requires_grad])


def values_scaled(model: Any, optimizer: AdamW) -> None:
    torch._foreach_mul_([p for p in model.parameters() if p.requires_grad], 0.5)


def replaced(model: Any, optimizer: AdamW) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad = param.grad * 0.5


def edited_run(edit: Callable[[Any, AdamW], None] | None, synchronize: Callable[[], None]) -> dict[str, str]:
    model = shard(net(torch.bfloat16), flat_mesh())
    model.register_forward_pre_hook(lambda *_: synchronize())
    options: dict[str, Any] = {"keep_grads": True, "max_grad_norm": None, "speculation": "always", "rank_check": "off"}
    with optimizer_of(model, **options) as optimizer:
        for step in range(4):
            optimizer.zero_grad()
            model.loss(tokens_of(step, dist.get_rank())).backward()
            synchronize()
            if step in (1, 3) and edit is not None:
                with torch.no_grad():
                    edit(model, optimizer)
            optimizer.step()
            synchronize()
        return optimizer.state_digests()


def edits(edit: Callable[[Any, AdamW], None]) -> list[bool]:
    """In a rank: over a device as on the host; and as without the edit, which must not be."""
    fake = Fake()
    expected = edited_run(edit, lambda: None)
    comparing = mock.patch(
        "superoffload.engine.inbox.same_bits", side_effect=AssertionError("a gradient was copied down again")
    )
    with on_fake_device(fake, keep_grads=True) as links, comparing:
        found = edited_run(edit, fake.synchronize)
        assert isinstance(links[0], LateLink)
    fake.synchronize()
    return [found == expected, edited_run(None, lambda: None) == expected]


@pytest.mark.parametrize("edit", [clipped, negated, replaced, values_negated, values_scaled])
def test_edits_on_a_device_are_noticed(edit: Callable[[Any, AdamW], None]) -> None:
    """Operations on lists raise no version counter of a DTensor."""
    Fake()
    assert on_ranks(2, edits, edit) == [[True, False]] * 2


# ---- DDP ------------------------------------------------------------------------------------------------------------


def optimizer_told(model: nn.Module, told: bool, **options: Any) -> AdamW:
    """``told``: it has its communication hook there; else gradients are read at step()."""
    params = [p for p in model.parameters() if p.requires_grad]
    options = {"lr": 3e-3, "threads": 1, "bucket_numel": 1024, "rank_timeout": 20.0, **options}
    return AdamW(params, model=model if told else None, **options)


def without_comparing(view: bool, static: bool) -> list[Any]:
    """Gradients that nobody edits are taken as they are: nothing is compared, so on a GPU nothing is copied down."""
    results: list[Any] = []
    for told in (True, False):
        inner = net(torch.float32)
        model = DistributedDataParallel(inner, bucket_cap_mb=0.005, gradient_as_bucket_view=view, static_graph=static)
        with optimizer_told(model, told, max_grad_norm=1.0) as optimizer:
            counts = []
            for step in range(4):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                core = optimizer._core
                with mock.patch.object(core.packer, "gradient_is", side_effect=core.packer.gradient_is) as compared:
                    optimizer.step()
                counts.append(compared.call_count)
            results.append((optimizer.state_digests(), counts, optimizer.stats()["buckets_speculated"]))
    (digests, counts, speculated), (expected, _, _) = results
    return [digests == expected, counts, speculated > 0]


@pytest.mark.parametrize("view", [False, True])
def test_reduced_gradients_are_not_read_twice(view: bool) -> None:
    assert on_ranks(2, without_comparing, view, False) == [[True, [0, 0, 0, 0], True]] * 2


def test_the_first_backward_of_a_static_graph_is_compared() -> None:
    """DDP has put the gradients in place before anybody can look."""
    for same, counts, speculated in on_ranks(2, without_comparing, False, True):
        assert same and speculated
        assert counts[0] > 0 and counts[1:] == [0, 0, 0]


def listed(model: Any, step: int) -> None:
    torch._foreach_mul_(grads_of(model), 0.5)


def clipped_by_hand(model: Any, step: int) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def first_replaced(model: Any, step: int) -> None:
    param = next(model.parameters())
    param.grad = 2 * param.grad


def last_removed(model: Any, step: int) -> None:
    [p for p in model.parameters() if p.requires_grad][-1].grad = None


def view_edited(model: Any, step: int) -> None:
    grads_of(model)[1].view(-1)[:1].add_(1.0)


def ddp_edits(edit: Callable[[Any, int], None], view: bool) -> list[bool]:
    digests = []
    for told in (True, False):
        for edits in (True, False):
            model = DistributedDataParallel(net(torch.float32), bucket_cap_mb=0.005, gradient_as_bucket_view=view)
            with optimizer_told(model, told) as optimizer:
                for step in range(4):
                    optimizer.zero_grad()
                    loss_of(model, step).backward()
                    if step == 3:
                        loss_of(model, 40).backward()
                    if edits and step in (1, 3):
                        with torch.no_grad():
                            edit(model, step)
                    optimizer.step()
                digests.append(optimizer.state_digests())
    with_hook, unedited, without_hook, _ = digests
    return [with_hook == without_hook, with_hook != unedited]


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("edit", [listed, clipped_by_hand, first_replaced, last_removed, view_edited])
def test_edits_of_reduced_gradients_are_noticed(edit: Callable[[Any, int], None], view: bool) -> None:
    """As without our communication hook, where gradients are read at step()."""
    assert on_ranks(2, ddp_edits, edit, view) == [[True, True]] * 2


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Linear(6, 6)
        self.heads = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])

    def forward(self, x: Tensor, head: int) -> Tensor:
        out: Tensor = self.heads[head](self.body(x))
        return out


def left_alone(view: bool) -> bool:
    """A head that only a backward without synchronization has used: DDP leaves its gradient as it is."""
    digests = []
    for told in (True, False):
        inner = TwoHeads()
        model = DistributedDataParallel(inner, find_unused_parameters=True, gradient_as_bucket_view=view)
        with optimizer_told(model, told, rank_check="off") as optimizer:
            for step in range(4):
                optimizer.zero_grad()
                values = torch.full((2, 6), 0.1 * (step + 1))
                with model.no_sync():
                    model(values, step % 2).square().mean().backward()
                model(values, 0).square().mean().backward()
                optimizer.step()
            digests.append(optimizer.state_digests())
    return digests[0] == digests[1]


@pytest.mark.parametrize("view", [False, True])
def test_gradients_that_ddp_leaves_alone_are_stepped_as_they_are(view: bool) -> None:
    assert on_ranks(2, left_alone, view) == [True, True]
