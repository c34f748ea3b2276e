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
from tests.support.adamw_training import batch, model_of
from tests.support.fake_cuda import Fake, LateLink, on_fake_device
from tests.support.fake_cuda_training import moves_behind_the_stream
from tests.support.link_runs import LATE, deep_model, run_model, run_on_fake, run_on_host, steps

# ---- the same bits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "mode", "options"),
    [
        (torch.float32, "always", {"max_grad_norm": 0.5}),
        (torch.bfloat16, "never", {"max_grad_norm": 0.5}),
        (torch.float16, "always", {"link": {"image": b""}}),
    ],
    ids=str,
)
def test_bits_of_the_host_link(fake: Fake, dtype: torch.dtype, mode: str, options: dict[str, Any]) -> None:
    """Without an image there are no kernels, and the CPU sums the squares. What travels is in the model's dtype."""
    expected, _ = run_on_host(steps, dtype, speculation=mode, max_grad_norm=options.get("max_grad_norm"))
    fake.delays(1, LATE)
    digests, stats = run_on_fake(fake, steps, dtype, speculation=mode, **options)
    assert digests == expected
    parameters = sum(param.numel() for param in model_of(dtype).parameters())
    assert stats["bytes_down"] == 6 * dtype.itemsize * parameters <= stats["bytes_up"]
    assert (fake.calls("cuLaunchKernel") == 0) == ("link" in options)
    assert fake.mismatches == 0, "a parameter was overwritten before its readers were done"


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
    three = partial(steps, seeds=range(3))
    expected, _ = run_model(three, torch.float32, options, lambda: None, make_model)
    fake.delays(3, LATE)
    with on_fake_device(fake):
        options["placement"] = {"gpu_fraction": gpu_fraction}
        assert run_model(three, torch.float32, options, fake.synchronize, make_model)[0] == expected
    sums, compared = fake.calls("sum_bits"), fake.calls("compare_bits")
    noticing = bool(compared) + (sums + compared if count > 125 else 0)  # marks, once, and lists
    assert fake.calls("cuMemcpyHtoDAsync_v2") == 3 * copied + noticing


def test_only_what_has_a_gradient_is_delivered(fake: Fake) -> None:
    """Parameters of the same bucket before, between and behind others whose gradients do not come."""

    def some(model: nn.Module, optimizer: AdamW) -> None:
        for number, param in enumerate(model.parameters()):
            param.requires_grad_(number % 2 == 1)
        steps(model, optimizer)
        for param in model.parameters():
            param.requires_grad_(True)
        steps(model, optimizer, range(6, 8))

    options: dict[str, Any] = {"bucket_numel": 100_000}
    expected, _ = run_on_host(some, torch.bfloat16, **options)
    fake.delays(10, LATE)
    digests, _ = run_on_fake(fake, some, torch.bfloat16, **options)
    assert digests == expected and fake.mismatches == 0


def test_arrivals_are_seen_by_events_where_flags_are_not_supported(fake: Fake) -> None:
    expected, _ = run_on_host(steps, torch.bfloat16)
    fake.delays(4, LATE)
    fake.writes_values(False)
    digests, _ = run_on_fake(fake, steps, torch.bfloat16)
    assert digests == expected
    assert fake.calls("cuStreamWriteValue32_v2") == 1, "asked once, then left alone"


def test_the_early_stop_sees_gradients_that_arrive_late(fake: Fake) -> None:
    """A norm that proves a clip is noticed while backward goes on, although no arrival is done when it is packed."""

    def train(model: nn.Module, optimizer: AdamW) -> None:
        steps(model, optimizer, range(1))
        optimizer.zero_grad()
        parameters = list(model.parameters())[::-1]
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(lambda _: fake.synchronize())  # each waits for the device
        batch(model, 1, scale=50.0).backward()
        optimizer.step()

    digests, stats = run_on_fake(fake, train, max_grad_norm=1e-3)
    assert stats["buckets_stepped"] + stats["buckets_two_phase"] > 0
    assert digests == run_on_host(train, max_grad_norm=1e-3)[0]


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
            assert optimizer._engine.tail.is_landing == (delivery == "on_demand" and seed > 0)
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
        fake.delays(seed, LATE)
        with on_fake_device(fake), mock.patch.object(LateLink, "make_visible", lambda link, bucket: None):
            return on_demand(fake.synchronize, "on_demand", mode) != expected

    assert mode == "always" or any(forgets_to_wait(seed) for seed in range(6)), "forward never read an old parameter"


# ---- a wait that is missing is noticed ------------------------------------------------------------------------------


PLACED = {"placement": {"gpu_fraction": 1.0}}


def _differs_without(fake: Fake, later: str, earlier: str, *, room: int = 1 << 30, **options: Any) -> bool:
    """Whether some seed shows that the wait of one stream for the other is needed. ``room``: for blocks. Delays grow
    from seed to seed: on a busy machine short ones end before anything reads."""
    settings = {"max_grad_norm": 0.5, **options}
    expected, _ = run_model(
        steps, torch.bfloat16, {**settings, "keep_grads": None, "placement": None}, lambda: None, deep_model
    )
    for seed in range(8):
        with on_fake_device(fake) as links, moves_behind_the_stream(fake):

            def train(model: nn.Module, optimizer: AdamW, links: list[LateLink] = links) -> None:
                links[0].fake_device.free = room
                fake.drop_waits(links[0].roles[later], links[0].roles[earlier])
                steps(model, optimizer)

            fake.delays(seed, LATE * (1 << seed // 2))
            digests, _ = run_model(train, torch.bfloat16, settings, fake.synchronize, deep_model)
            for stream in links[0].roles.values():
                fake.synchronize(stream)
            if digests != expected or fake.mismatches:
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
