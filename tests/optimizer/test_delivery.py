"""``delivery="on_demand"``: the bits of eager delivery, whatever a training loop does; its arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from superoffload import AdamW
from superoffload.errors import ArgumentError
from tests.support.delivery_loops import STEPS, Loop, compare, loss_of, odd, plain, plain_step


def evaluating(model: Any, optimizer: AdamW, seen: list[Any]) -> None:
    for seed in range(STEPS):
        plain_step(model, optimizer, seed)
        model.eval()
        with torch.no_grad() if seed % 2 else torch.inference_mode():
            seen.append(loss_of(model, 100 + seed).item())
        model.train()


def partly_used(model: Any, optimizer: AdamW, seen: list[Any]) -> None:
    """What is not used in a forward lands before its next gradient, or with the next step."""
    for seed in range(STEPS):
        model.used = seed % 2 == 0
        plain_step(model, optimizer, seed)


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


LOOPS = [evaluating, partly_used, recomputing, saving]


@pytest.mark.over_stand_in(brings_back="sometimes")
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
