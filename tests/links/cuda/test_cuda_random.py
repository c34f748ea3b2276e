"""Random programs over a device that is late, with random settings: the bits of the host, whatever a program does with
gradients after they were packed and freed.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW
from superoffload.engine.schedule import MODES
from tests.support.adamw_training import DTYPES, batch, grads_of, model_of
from tests.support.fake_cuda import Fake
from tests.support.fake_cuda_training import LATE, branches, deep_model, free_bytes, run, seen, wide_model
from tests.support.fp32_gradients import needs_grad_dtype

pytestmark = [
    needs_grad_dtype,
    pytest.mark.filterwarnings("ignore:superoffload. ", "ignore:Using backward.. with create_graph"),
]
STEPS = 6


def images(dtype: torch.dtype) -> nn.Module:
    """Parameters whose elements are in another order in memory."""
    torch.manual_seed(0)
    layers = (nn.Unflatten(1, (4, 2, 2)), nn.Conv2d(4, 8, 2), nn.Flatten(), nn.Linear(8, 4))
    model: Any = nn.Sequential(*layers).to(dtype)
    made: nn.Module = model.to(memory_format=torch.channels_last)
    return made


class Experts(nn.Module):
    """A batch uses one half of the parameters, so that backward passes the buckets of the other one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.halves = nn.ModuleList(nn.Sequential(*(nn.Linear(16, 16) for _ in range(16))) for _ in range(2))
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.halves[int(x[0, 0] > 0)](x))


def experts(dtype: torch.dtype) -> nn.Module:
    return Experts().to(dtype)


MODELS = (model_of, model_of, branches, images, deep_model, wide_model)


# ---- what a program does between backward and step ------------------------------------------------------------------


def nothing(model: nn.Module) -> None:
    """The most common one."""


def read(model: nn.Module) -> Any:
    return [grad.norm() for grad in grads_of(model)]


def clipped(model: nn.Module) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def multiply_in_place(model: nn.Module) -> None:
    torch._foreach_mul_(grads_of(model), 0.5)


def multiply_after_a_look(model: nn.Module) -> None:
    for grad in grads_of(model)[::2]:
        with torch.inference_mode():
            grad.norm()
        grad[...].mul_(2)


def replace_some(model: nn.Module) -> None:
    for param in list(model.parameters())[::3]:
        param.grad = None if param.grad is None else param.grad * 2


def set_some_to_zero(model: nn.Module) -> None:
    torch._foreach_zero_(grads_of(model)[1:3])


def take_some_away(model: nn.Module) -> None:
    for param in list(model.parameters())[1::3]:
        param.grad = None


BETWEEN: list[Callable[[nn.Module], Any]] = [
    *(nothing, nothing, nothing, read, clipped, multiply_in_place, multiply_after_a_look),
    *(replace_some, set_some_to_zero, take_some_away),
]


def program(seed: int, model: nn.Module, optimizer: AdamW) -> list[Any]:
    """``seed`` says what it does; on the host and on a device it is the same."""
    chance, found = random.Random(seed), []
    state = None
    poisoned = chance.randrange(2, STEPS)
    for number in range(STEPS):
        begin_step(chance, model, optimizer)
        optimizer.max_grad_norm = chance.choice([0.05, 1.0, 100.0])
        optimizer.param_groups[0]["lr"] = chance.choice([1e-2, 1e-3])
        count = chance.choice([1, 1, 2, 3])
        for micro in range(count):
            told = micro < count - 1 and chance.random() < 0.4
            with optimizer.accumulate() if told else nullcontext():
                run_backward(chance, batch(model, 10 * number + micro), number == poisoned)
            found.append(seen(chance.choice(BETWEEN)(model)))
        if chance.random() < 0.15:
            in_order(model)
            state = copy.deepcopy(optimizer.state_dict())
        elif state is not None and chance.random() < 0.3:
            in_order(model)
            optimizer.load_state_dict(state)
        for _ in range(chance.choice([0, 1, 1, 1, 1, 2])):
            optimizer.step()
    return [found, optimizer.stats()["skipped_steps"] > 0]


def begin_step(chance: random.Random, model: nn.Module, optimizer: AdamW) -> None:
    way = chance.choice(["none", "none", "zeros", "model", "kept"])
    if way == "model":
        model.zero_grad()
    elif way != "kept":
        optimizer.zero_grad(set_to_none=way == "none")


def run_backward(chance: random.Random, loss: Tensor, is_poisoned: bool) -> None:
    if is_poisoned:
        (loss * torch.nan).backward()
    elif chance.random() < 0.2:
        loss.backward(retain_graph=True)
        (0.5 * loss).backward(create_graph=chance.random() < 0.3)
    else:
        loss.backward()


def in_order(model: Any) -> None:
    """A forward waits for the stand-in's current stream."""
    model(torch.ones(2, 16, dtype=next(model.parameters()).dtype))


def settings(chance: random.Random) -> tuple[dict[str, Any], dict[str, Any], torch.dtype]:
    """Of the optimizer, those that only a device knows, and the dtype of the model."""
    dtype = chance.choice(DTYPES)
    options: dict[str, Any] = {"state_dtype": chance.choice(["fp32", "fp32", "bf16", "8bit"]), "seed": 3}
    if dtype is torch.bfloat16 and chance.random() < 0.5:
        options["master_dtype"] = "split"
    if dtype is not torch.float32 and chance.random() < 0.4:
        options["accumulate_dtype"] = "fp32"
    link: dict[str, Any] = {"image": b""} if chance.random() < 0.25 else {}
    device: dict[str, Any] = {
        "speculation": chance.choice(MODES),
        "bucket_numel": chance.choice([256, 1024, 1024, 100_000]),
        "threads": chance.choice([1, 3]),
        "link": link,
    }
    if not link:
        device["placement"] = chance.choice([None, {"gpu_fraction": 0.5}, {"gpu_fraction": 1.0}, "auto"])
    return options, device, dtype


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_have_the_bits_of_the_host(fake: Fake, seed: int) -> None:
    chance = random.Random(1000 + seed)
    options, device, dtype = settings(chance)
    make = chance.choice(MODELS)
    if seed % 4 == 0:
        make, device = experts, {**device, "speculation": "always", "bucket_numel": 256}

    def code(model: nn.Module, optimizer: AdamW) -> list[Any]:
        return program(seed, model, optimizer)

    expected = run(code, dtype, make, **options)
    fake.delays(seed, chance.choice([300, LATE]))
    with free_bytes(chance.choice([0, 1 << 30])):
        found = run(code, dtype, make, fake=fake, **options, **device)
    assert found.bits == expected.bits, (options, device, dtype, make)
    assert fake.mismatches == 0
