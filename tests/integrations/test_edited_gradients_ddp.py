"""Edits of gradients that DDP has reduced are noticed, and none is read twice to find them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from superoffload import AdamW
from tests.support.adamw_training import grads_of
from tests.support.rank_processes import loss_of, net, on_ranks


def optimizer_told(model: nn.Module, told: bool, **options: Any) -> AdamW:
    """``told``: it has its communication hook there; else gradients are read at step()."""
    params = [p for p in model.parameters() if p.requires_grad]
    options = {"lr": 3e-3, "threads": 1, "bucket_numel": 1024, "rank_timeout": 20.0, **options}
    return AdamW(params, model=model if told else None, **options)


def without_comparing(view: bool, static: bool) -> None:
    """Unedited gradients are taken as they are: nothing is compared, so on a GPU nothing is copied down."""
    results: list[Any] = []
    for told in (True, False):
        inner = net(torch.float32)
        model = DistributedDataParallel(inner, bucket_cap_mb=0.005, gradient_as_bucket_view=view, static_graph=static)
        with optimizer_told(model, told, max_grad_norm=1.0) as optimizer:
            counts = []
            for step in range(4):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                packer = optimizer._engine.packer
                with mock.patch.object(packer, "gradient_is", side_effect=packer.gradient_is) as compared:
                    optimizer.step()
                counts.append(compared.call_count)
            results.append((optimizer.state_digests(), counts, optimizer.stats()["buckets_speculated"]))
    (digests, counts, speculated), (expected, _, _) = results
    assert digests == expected and speculated > 0
    assert (counts[0] > 0) == static and counts[1:] == [0, 0, 0]


@pytest.mark.parametrize(("view", "static"), [(False, False), (True, False), (False, True)])
def test_reduced_gradients_are_not_read_twice(view: bool, static: bool) -> None:
    """But for the first of a static graph, which DDP has put in place before the optimizer can look."""
    on_ranks(2, without_comparing, view, static)


def listed(model: Any) -> None:
    torch._foreach_mul_(grads_of(model), 0.5)


def clipped_by_hand(model: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def first_replaced_last_removed(model: Any) -> None:
    params = [p for p in model.parameters() if p.requires_grad]
    params[0].grad = 2 * params[0].grad
    params[-1].grad = None


def view_edited(model: Any) -> None:
    grads_of(model)[1].view(-1)[:1].add_(1.0)


EDITS = (listed, clipped_by_hand, first_replaced_last_removed, view_edited)


def ddp_edits(view: bool) -> None:
    """The third step of each edit has two backwards."""
    digests = []
    for told, edits in ((True, True), (True, False), (False, True)):
        found = []
        model = DistributedDataParallel(net(torch.float32), bucket_cap_mb=0.005, gradient_as_bucket_view=view)
        with optimizer_told(model, told) as optimizer:
            for step in range(3 * len(EDITS)):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                if step % 3 == 2:
                    loss_of(model, 40).backward()
                if edits and step % 3:
                    with torch.no_grad():
                        EDITS[step // 3](model)
                optimizer.step()
                found.append(optimizer.state_digests())
        digests.append(found)
    with_hook, unedited, without_hook = digests
    assert with_hook == without_hook
    assert with_hook[1] != unedited[1]


@pytest.mark.parametrize("view", [False, True])
def test_edits_of_reduced_gradients_are_noticed(view: bool) -> None:
    """As without our communication hook, where gradients are read at step()."""
    on_ranks(2, ddp_edits, view)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Linear(6, 6)
        self.heads = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])

    def forward(self, x: Tensor, *heads: int) -> Tensor:
        return sum((self.heads[head](self.body(x)) for head in heads), start=torch.zeros(()))


def two_heads(told: bool, view: bool, **options: Any) -> tuple[DistributedDataParallel, AdamW]:
    model = DistributedDataParallel(
        TwoHeads(), bucket_cap_mb=0.0001, find_unused_parameters=True, gradient_as_bucket_view=view
    )
    return model, optimizer_told(model, told, **options)


def left_alone(view: bool) -> None:
    """A head that only a backward without synchronization has used: DDP leaves its gradient as it is."""
    digests = []
    for told in (True, False):
        model, optimizer = two_heads(told, view, rank_check="off")
        with optimizer:
            for step in range(4):
                optimizer.zero_grad()
                values = torch.full((2, 6), 0.1 * (step + 1))
                with model.no_sync():
                    model(values, step % 2).square().mean().backward()
                model(values, 0).square().mean().backward()
                optimizer.step()
            digests.append(optimizer.state_digests())
    assert digests[0] == digests[1]


@pytest.mark.parametrize("view", [False, True])
def test_gradients_that_ddp_leaves_alone_are_stepped_as_they_are(view: bool) -> None:
    on_ranks(2, left_alone, view)
