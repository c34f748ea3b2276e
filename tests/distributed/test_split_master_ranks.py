"""Split masters on several ranks: the full check knows their rounding, and finds what is wrong with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from superoffload.host.tensors import local_of
from tests.support.rank_faults import train_until_error
from tests.support.rank_processes import Net, on_ranks, optimizer_of, tokens_of
from tests.support.saved_ranks import build, step
from tests.support.split_masters import assert_split, away, same_bits, same_states, state_of, tied


def skipped_step(model: Net, optimizer: Any) -> None:
    """One rank has a gradient that is no number."""
    optimizer.zero_grad()
    model.loss(tokens_of(50, 0)).backward()
    weight = next(model.layers.parameters())
    if dist.get_rank() == 1:
        assert weight.grad is not None
        local_of(weight.grad).view(-1)[-1] = torch.nan
    optimizer.step()


def carried(way: str, first: str, second: str) -> list[Any]:
    """Masters at ties, of which the parameters are the even neighbours, and then, behind a step of nothing, either
    rounding; loaded by optimizers of the other kind. All ranks check everything at every step."""
    model, options = build(way)
    found: list[Any] = []
    checks: dict[str, Any] = {"rank_check": "full", "lr": 0.0, "max_grad_norm": None, **options}
    with optimizer_of(model, master_dtype=first, **checks) as saved:
        step(model, saved, 0)
        tied(saved, model)
        for loads in range(2):
            masters = state_of(saved)
            other, _ = build(way, seed=7)
            with optimizer_of(other, master_dtype=second, **checks) as loaded:
                step(other, loaded, 1)
                other.load_state_dict(model.state_dict())
                loaded.load_state_dict(saved.state_dict())
                found.append(same_states(state_of(loaded), masters))
                skipped_step(other, loaded)  # checked as it was loaded: no step has published anything since
                found.append(same_states(state_of(loaded), masters))
                for group in loaded.param_groups:
                    group["lr"] = 1e-2
                step(other, loaded, 3)
                if second == "split":
                    assert_split(loaded)
                found.append(loaded.stats()["skipped_steps"])
            if loads == 0:
                step(model, saved, 2)
                published = [saved.holding_of(param).part(param.detach()) for param in saved.state]
                masters_now = [shard.read_masters() for shard in saved._engine.shards]
                rounded = map(away if first == "split" else Tensor.bfloat16, masters_now)
                found.append(all(map(same_bits, published, rounded)))
    return found


@pytest.mark.parametrize(
    ("way", "first", "second"),
    [("fsdp2", "split", "fp32"), ("shard", "fp32", "split"), ("replicate", "split", "split")],
)
def test_the_full_check_knows_both_roundings(way: str, first: str, second: str) -> None:
    assert on_ranks(2, carried, way, first, second) == [[True, True, 1, True, True, True, 1]] * 2


def test_a_bucket_that_is_not_published_is_found() -> None:
    results = on_ranks(2, train_until_error, "skip_publish", 10, 1, False, "light", 60, "eager", "split")
    assert len({message for _, message in results}) == 1, "the same error on every rank"
    number, message = results[0]
    assert "the published parameter is not round(master)" in message and 10 <= number <= 40
