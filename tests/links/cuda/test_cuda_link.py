"""Training over the fake driver: the bits of the host link, whatever is late, whatever is left out being noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from superoffload import AdamW
from tests.support.adamw_training import batch, train
from tests.support.fake_cuda import Fake, LateLink, on_fake_device
from tests.support.fake_cuda_training import LATE, deep_model, run


def test_arrivals_are_seen_by_events_where_flags_are_not_supported(fake: Fake) -> None:
    expected = run(train)
    fake.delays(4, LATE)
    fake.writes_values(False)
    assert run(train, fake=fake).digests == expected.digests
    assert fake.calls("cuStreamWriteValue32_v2") == 1, "asked once, then left alone"


# ---- delivery on demand ---------------------------------------------------------------------------------------------


def on_demand(synchronize: Callable[[], None], delivery: str) -> dict[str, str]:
    """Every module reads its parameters behind the current stream, as of the moment its forward begins."""
    model = deep_model(torch.bfloat16)
    options: dict[str, Any] = {"speculation": "never", "threads": 2, "bucket_numel": 1024, "max_grad_norm": 0.5}
    with AdamW(model.parameters(), delivery=delivery, module=model, **options) as optimizer:
        for module in model.modules():
            module.register_forward_pre_hook(lambda *_: synchronize())
        for seed in range(6):
            optimizer.zero_grad()
            batch(model, seed).backward()
            optimizer.step()
            assert optimizer._engine.last_step.is_landing == (delivery == "on_demand" and seed > 0)
        digests = optimizer.state_digests()
        synchronize()
        return {**digests, **optimizer.state_digests()}


def test_delivery_on_demand(fake: Fake) -> None:
    expected = on_demand(lambda: None, "eager")
    fake.delays(5, LATE)
    with on_fake_device(fake):
        assert on_demand(fake.synchronize, "on_demand") == expected
    assert fake.mismatches == 0

    def forgets_to_wait(seed: int) -> bool:
        fake.delays(seed, LATE * (1 + seed**2))  # longer and longer, for a machine that is slow
        with on_fake_device(fake), mock.patch.object(LateLink, "make_visible", lambda link, bucket: None):
            return on_demand(fake.synchronize, "on_demand") != expected

    assert any(forgets_to_wait(seed) for seed in range(6)), "forward never read an old parameter"


# ---- a wait that is missing is noticed ------------------------------------------------------------------------------


PLACED = {"placement": {"gpu_fraction": 1.0}}


def _differs_without(fake: Fake, later: str, earlier: str, *, room: int = 1 << 30, **options: Any) -> bool:
    """Whether some seed shows that the wait of one stream for the other is needed. ``room``: for blocks. Delays grow
    from seed to seed: on a busy machine short ones end before anything reads."""

    def without(model: nn.Module, optimizer: AdamW) -> None:
        link: Any = optimizer._engine.link
        link.fake_device.free = room
        fake.drop_waits(link.roles[later], link.roles[earlier])
        train(model, optimizer)

    expected = run(train, make=deep_model, max_grad_norm=0.5)
    for seed in range(8):
        fake.delays(seed, LATE * (1 << seed // 2))
        found = run(without, make=deep_model, fake=fake, max_grad_norm=0.5, **options)
        if found.digests != expected.digests or fake.mismatches:
            return True
    return False


@pytest.mark.parametrize(
    ("later", "earlier", "options"),
    [
        ("pack", "current", {}),  # gradients are written
        ("down", "pack", {}),  # they are packed
        ("pack", "down", {"room": 0}),  # the staging slot is free again
        ("up", "current", {}),  # old parameters are read
        ("current", "up", {}),  # new ones are there
        ("current", "pack", {"keep_grads": True}),  # gradients are read before they are written again
        ("current", "pack", {}),  # gradients that were packed into a block, before their memory goes
        ("pack", "current", PLACED),  # gradients are written, and the step before has read what is packed over
        ("current", "pack", PLACED),  # a step reads what was packed, and backward uses freed memory again
    ],
)
def test_a_missing_wait_changes_the_result(fake: Fake, later: str, earlier: str, options: dict[str, Any]) -> None:
    assert _differs_without(fake, later, earlier, **options)
