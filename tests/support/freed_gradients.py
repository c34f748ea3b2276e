"""Programs that need gradients after they were packed and freed, over the fake driver: the host's bits."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from superoffload import AdamW
from superoffload.engine.bucket import Shard
from superoffload.engine.engine import Engine
from superoffload.optimizer.packed_gradient import packed_in
from tests.support.adamw_training import batch, model_of
from tests.support.fake_cuda import Fake, on_fake_device, on_host
from tests.support.link_runs import LATE

Program = Callable[[Any, AdamW], Any]
MakeModel = Callable[[torch.dtype], nn.Module]

OPTIONS: dict[str, Any] = {"speculation": "always", "threads": 2, "bucket_numel": 1024}
NEEDED_AGAIN = "packed and freed during backward, and then needed again"


def seen(value: Any) -> Any:
    """As it is now, to be compared with ==."""
    if isinstance(value, Tensor):
        value = value.detach().clone()
        return value.dtype, tuple(value.shape), value.flatten().view(torch.uint8).tolist()
    return [seen(one) for one in value] if isinstance(value, (list, tuple)) else value


def on_the_host(
    program: Program, dtype: torch.dtype, make: MakeModel = model_of, **options: Any
) -> tuple[Any, dict[str, str]]:
    model = make(dtype)
    with on_host(), AdamW(model.parameters(), **{**OPTIONS, **options}) as optimizer:
        return seen(program(model, optimizer)), optimizer.state_digests()


def on_the_device(
    fake: Fake,
    program: Program,
    dtype: torch.dtype,
    make: MakeModel = model_of,
    link: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[tuple[Any, dict[str, str]], list[str], int]:
    """Likewise, what it warned of, and how many gradients are freed at the end."""
    model = make(dtype)
    model.register_forward_pre_hook(lambda *_: fake.synchronize())
    with on_fake_device(fake, **(link or {})), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with AdamW(model.parameters(), **{**OPTIONS, **options}) as optimizer:
            found = seen(program(model, optimizer))
            freed = sum(_is_freed(parameter.grad) for parameter in model.parameters())
            fake.synchronize()
            return (found, optimizer.state_digests()), [str(one.message) for one in caught], freed


def _is_freed(grad: Tensor | None) -> bool:
    packed = packed_in(grad)
    return packed is not None and packed.in_memory is None


def check(
    fake: Fake,
    program: Program,
    dtype: torch.dtype = torch.bfloat16,
    make: MakeModel = model_of,
    *,
    told: bool = True,
    **options: Any,
) -> None:
    """``told``: whether the user learns, once, that gradients were brought back."""
    expected = on_the_host(program, dtype, make)
    for seed, placement in enumerate((None, {"gpu_fraction": 0.5})):
        fake.delays(seed, LATE)
        found, messages, _ = on_the_device(fake, program, dtype, make, placement=placement, **options)
        assert found == expected, placement
        assert sum(NEEDED_AGAIN in message for message in messages) == told
    assert fake.mismatches == 0


@contextmanager
def taken_back() -> Iterator[list[str]]:
    """The shards of which a gradient was taken back inside."""
    names: list[str] = []
    retract = Engine.retract

    def counted(engine: Engine, shard: Shard) -> None:
        names.append(shard.name)
        retract(engine, shard)

    with mock.patch.object(Engine, "retract", counted):
        yield names


def clipped(model: nn.Module) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def steps(model: nn.Module, optimizer: AdamW, between: Callable[[], Any] = lambda: None, count: int = 3) -> list[Any]:
    """``between``: after backward and before ``step()``."""
    results = []
    for seed in range(count):
        optimizer.zero_grad()
        batch(model, seed).backward()
        results.append(seen(between()))
        optimizer.step()
    return results


class Branches(nn.ModuleList):
    """Gradients come not in the order of registration, so that buckets are laid out anew after the first step."""

    def forward(self, values: Tensor) -> Tensor:
        for index in (1, 0, 2):
            layer: Any = self[index]
            values = layer(values.to(layer.weight.dtype))
        return values


def branches(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return Branches([nn.Linear(24, 24), nn.Linear(16, 24), nn.Linear(24, 4)]).to(dtype)


def images(dtype: torch.dtype) -> nn.Module:
    """Parameters whose elements are in another order in memory."""
    torch.manual_seed(0)
    layers = (nn.Unflatten(1, (4, 2, 2)), nn.Conv2d(4, 8, 2), nn.Flatten(), nn.Linear(8, 4))
    model: Any = nn.Sequential(*layers).to(dtype)
    made: nn.Module = model.to(memory_format=torch.channels_last)
    return made
