"""Edits of gradients and parameters that are DTensors on a device are noticed, and no gradient is copied down again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from superoffload import AdamW
from tests.support.adamw_training import grads_of
from tests.support.fake_cuda import Fake, LateLink, on_fake_device
from tests.support.rank_processes import flat_mesh, net, on_ranks, optimizer_of, shard, tokens_of


def clipped(model: Any, optimizer: AdamW) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def negated(model: Any, optimizer: AdamW) -> None:
    torch._foreach_neg_(grads_of(model))


def values_negated(model: Any, optimizer: AdamW) -> None:
    torch._foreach_neg_([p for p in model.parameters() if p.requires_grad])


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


EDITS = (clipped, negated, replaced, values_negated)


def found_edits() -> list[tuple[str, bool, bool]]:
    """In a rank, of every edit: whether it gives over a device what it gives on the host, and whether it is lost."""
    fake = Fake()
    unedited = edited_run(None, lambda: None)
    found = []
    for edit in EDITS:
        expected = edited_run(edit, lambda: None)
        comparing = mock.patch(
            "superoffload.engine.inbox.same_bits", side_effect=AssertionError("a gradient was copied down again")
        )
        with on_fake_device(fake, keep_grads=True) as links, comparing:
            over_device = edited_run(edit, fake.synchronize)
            assert isinstance(links[0], LateLink)
        fake.synchronize()
        found.append((edit.__name__, over_device == expected, expected == unedited))
    return found


def test_edits_on_a_device_are_noticed() -> None:
    """Operations on lists raise no version counter of a DTensor."""
    Fake()
    assert on_ranks(2, found_edits) == [[(edit.__name__, True, False) for edit in EDITS]] * 2


def negated_in_memory(grad: Any) -> Any:
    """The same values, with torch's negative bit: their memory has the opposite signs."""
    local = torch._neg_view(-grad.to_local())
    layout = {"run_check": False, "shape": grad.shape, "stride": grad.stride()}
    return DTensor.from_local(local, grad.device_mesh, grad.placements, **layout)


def added_to(as_given: Callable[[Any], Any]) -> dict[str, str]:
    """In a rank: a second backward adds to gradients that the program has put in place."""
    model = shard(net(torch.float32), flat_mesh())
    with optimizer_of(model, speculation="always") as optimizer:
        for step in range(3):
            optimizer.zero_grad()
            model.loss(tokens_of(2 * step, dist.get_rank())).backward()
            for param in model.parameters():
                if param.grad is not None:
                    param.grad = as_given(param.grad)
            model.loss(tokens_of(2 * step + 1, dist.get_rank())).backward()
            optimizer.step()
        return optimizer.state_digests()


def test_bits_of_a_gradient_with_the_negative_bit_are_compared_by_their_own_signs() -> None:
    assert on_ranks(2, added_to, negated_in_memory) == on_ranks(2, added_to, torch.clone)
