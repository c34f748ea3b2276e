"""``delivery="on_demand"``: the bits of eager delivery, whatever a training loop does; its arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from superoffload import AdamW
from superoffload.errors import ArgumentError
from tests.support.compatibility import compat
from tests.support.delivery_loops import STEPS, Loop, compare, loss_of, odd, plain, plain_step
from tests.support.over_stand_in import SOMETIMES_SLOWER


@pytest.mark.parametrize(
    ("mode", "dtype"), [("always", torch.bfloat16), ("never", torch.float32), ("adaptive", torch.bfloat16)]
)
def test_every_mode(mode: str, dtype: torch.dtype) -> None:
    optimizer = compare(plain, lambda: odd(dtype), speculation=mode)
    stats = optimizer.stats()
    assert stats["steps"] == STEPS and stats["clipped_steps"] > 0


def evaluating(model: Any, optimizer: AdamW, seen: list[Any]) -> None:
    for seed in range(STEPS):
        plain_step(model, optimizer, seed)
        model.eval()
        with torch.no_grad() if seed % 2 else torch.inference_mode():
            seen.append(loss_of(model, 100 + seed).item())
        model.train()


def accumulating_unannounced(model: Any, optimizer: AdamW, seen: list[Any]) -> None:
    for seed in range(STEPS):
        optimizer.zero_grad()
        for micro in range(3):
            loss_of(model, 3 * seed + micro).backward()
        optimizer.step()


def partly_used(model: Any, optimizer: AdamW, seen: list[Any]) -> None:
    """What is not used in a forward lands before its next gradient, or with the next step."""
    for seed in range(STEPS):
        model.used = seed % 2 == 0
        plain_step(model, optimizer, seed)


def skipping(model: Any, optimizer: AdamW, seen: list[Any]) -> None:
    for seed in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, seed)
        (loss * (float("nan") if seed in (2, 4) else 1.0)).backward()
        optimizer.step()
        seen.append(loss.item())


def without_step(model: Any, optimizer: AdamW, seen: list[Any]) -> None:
    for seed in range(STEPS):
        plain_step(model, optimizer, seed)
        loss_of(model, 50 + seed).backward()  # thrown away


def scaled(model: Any, optimizer: AdamW, seen: list[Any]) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for seed in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, seed)
        scaler.scale(loss * (float("inf") if seed == 3 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append(loss.item())


def recomputing(model: Any, optimizer: AdamW, seen: list[Any]) -> None:
    model.checkpointing = True
    plain(model, optimizer, seen)


def saving(model: Any, optimizer: AdamW, seen: list[Any]) -> None:
    for seed in range(STEPS):
        plain_step(model, optimizer, seed)
        part = model.blocks[1] if seed % 2 else model
        saved = {name: value.clone() for name, value in part.state_dict().items()}
        seen.append([value.tolist() for value in saved.values()])
        plain_step(model, optimizer, 50 + seed)
        part.load_state_dict(saved)
        state = optimizer.state_dict()
        plain_step(model, optimizer, 70 + seed)
        optimizer.load_state_dict(state)


def growing(model: Any, optimizer: AdamW, seen: list[Any]) -> None:
    plain(model, optimizer, seen)
    model.frozen.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.frozen.parameters()), "lr": 1e-2})
    plain(model, optimizer, seen)


def changing_settings(model: Any, optimizer: AdamW, seen: list[Any]) -> None:
    for seed in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, seed).backward()
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + seed)
        optimizer.max_grad_norm = 0.1 * (1 + seed)
        optimizer.step()
        seen.append(optimizer.grad_norm)


LOOPS = [
    evaluating,
    accumulating_unannounced,
    partly_used,
    skipping,
    without_step,
    scaled,
    recomputing,
    saving,
    growing,
    changing_settings,
]


@compat("delivery on demand: the bits of eager delivery", "single")
@compat("delivery on demand: the bits of eager delivery", "stand_in", note=SOMETIMES_SLOWER)
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_loops(loop: Loop) -> None:
    compare(loop)


def test_arguments() -> None:
    model, other = odd(), odd()
    trained = [p for p in model.parameters() if p.requires_grad]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"delivery": "later"}, "expected 'eager' or 'on_demand'"),
        ({"delivery": "on_demand"}, "needs the module"),
        ({"module": model, "model": other}, "module and model are not the same"),
        ({"module": trained}, "module: list, expected the torch.nn.Module"),
        ({"delivery": "on_demand", "module": other}, "is no parameter of module"),
        ({"delivery": "on_demand", "module": model, "replicated": "shard"}, "replicated='shard'"),
    ]
    for options, message in wrong:
        with pytest.raises(ArgumentError, match=message):
            AdamW(trained, **options)
    assert not any(module._forward_pre_hooks for module in model.modules())
    with AdamW(model.head.parameters(), delivery="on_demand", model=model) as optimizer:
        with pytest.raises(ArgumentError, match="is no parameter of module"):
            optimizer.add_param_group({"params": list(other.blocks.parameters())})
        assert len(optimizer.param_groups) == 1
