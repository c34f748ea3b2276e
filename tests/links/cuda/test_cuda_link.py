"""Training over the fake driver: the bits of the host link, whatever is late, whatever is left out being noticed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from superoffload import AdamW
from tests.support.adamw_training import batch, train
from tests.support.fake_cuda import Fake, LateLink, on_fake_device
from tests.support.fake_cuda_training import LATE, deep_model, run

# ---- the same bits --------------------------------------------------------------------------------------------------


class Scales(nn.Module):
    """As many parameters as asked for, all in one bucket."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.full((3 + i,), 1 + i / 1000) for i in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            x = x * scale.sum() / len(scale)
        return x[:, :4]


@pytest.mark.parametrize(("gpu_fraction", "count", "copied"), [(0, 125, 1), (0, 126, 3), (1, 18, 1)])
def test_lists_travel_with_the_launch_unless_they_are_long(
    fake: Fake, gpu_fraction: int, count: int, copied: int
) -> None:
    """A copy of a list of parameters could wait behind long uploads. ``copied``: per step."""

    def make_model(dtype: torch.dtype) -> nn.Module:
        return Scales(count).to(dtype)

    options: dict[str, Any] = {"bucket_numel": 100_000, "threads": 1}
    three = partial(train, seeds=range(3))
    expected = run(three, torch.float32, make_model, **options)
    fake.delays(3, LATE)
    options["placement"] = {"gpu_fraction": gpu_fraction}
    assert run(three, torch.float32, make_model, fake=fake, **options).digests == expected.digests
    sums, compared = fake.calls("sum_bits"), fake.calls("compare_bits")
    noticing = bool(compared) + (sums + compared if count > 125 else 0)  # marks, once, and lists
    assert fake.calls("cuMemcpyHtoDAsync_v2") == 3 * copied + noticing


def test_only_what_has_a_gradient_is_delivered(fake: Fake) -> None:
    """Parameters of the same bucket before, between and behind others whose gradients do not come."""

    def some(model: nn.Module, optimizer: AdamW) -> None:
        for number, param in enumerate(model.parameters()):
            param.requires_grad_(number % 2 == 1)
        train(model, optimizer)
        for param in model.parameters():
            param.requires_grad_(True)
        train(model, optimizer, range(6, 8))

    expected = run(some, bucket_numel=100_000)
    fake.delays(10, LATE)
    assert run(some, fake=fake, bucket_numel=100_000).digests == expected.digests and fake.mismatches == 0


def test_arrivals_are_seen_by_events_where_flags_are_not_supported(fake: Fake) -> None:
    expected = run(train)
    fake.delays(4, LATE)
    fake.writes_values(False)
    assert run(train, fake=fake).digests == expected.digests
    assert fake.calls("cuStreamWriteValue32_v2") == 1, "asked once, then left alone"


def test_the_early_stop_sees_gradients_that_arrive_late(fake: Fake) -> None:
    """A norm that proves a clip is noticed while backward goes on, although no arrival is done when it is packed."""

    def program(model: nn.Module, optimizer: AdamW) -> None:
        train(model, optimizer, range(1))
        optimizer.zero_grad()
        parameters = list(model.parameters())[::-1]
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(lambda _: fake.synchronize())  # each waits for the device
        batch(model, 1, scale=50.0).backward()
        optimizer.step()

    found = run(program, torch.float32, fake=fake, max_grad_norm=1e-3)
    assert found.stats["buckets_stepped"] + found.stats["buckets_two_phase"] > 0
    assert found.digests == run(program, torch.float32, max_grad_norm=1e-3).digests


# ---- delivery on demand ---------------------------------------------------------------------------------------------


def on_demand(synchronize: Callable[[], None], delivery: str, mode: str) -> dict[str, str]:
    """Every module reads its parameters behind the current stream, as of the moment its forward begins."""
    model = deep_model(torch.bfloat16)
    options: dict[str, Any] = {"speculation": mode, "threads": 2, "bucket_numel": 1024, "max_grad_norm": 0.5}
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


@pytest.mark.parametrize("mode", ["always", "never"])
def test_delivery_on_demand(fake: Fake, mode: str) -> None:
    expected = on_demand(lambda: None, "eager", mode)
    fake.delays(5, LATE)
    with on_fake_device(fake):
        assert on_demand(fake.synchronize, "on_demand", mode) == expected
    assert fake.mismatches == 0

    def forgets_to_wait(seed: int) -> bool:
        fake.delays(seed, LATE * (1 + seed**2))  # longer and longer, for a machine that is slow
        with on_fake_device(fake), mock.patch.object(LateLink, "make_visible", lambda link, bucket: None):
            return on_demand(fake.synchronize, "on_demand", mode) != expected

    assert mode == "always" or any(forgets_to_wait(seed) for seed in range(6)), "forward never read an old parameter"


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
