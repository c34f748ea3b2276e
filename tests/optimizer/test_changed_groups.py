"""Programs change ``param_groups`` by hand: as in torch, the group that has a parameter says how it is stepped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW
from superoffload.errors import ArgumentError, HostMemoryError, StateError
from tests.support.adamw_training import batch, check_scenario, model_of, train

Optimizer = Any
Change = Callable[[Any, Optimizer], object]


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [{"params": params[:2], "lr": 1e-2}, {"params": params[2:], "lr": 1e-3, "weight_decay": 0.0}]


def fresh(dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.ones(3, dtype=dtype))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda _, groups: groups.append({"params": [fresh()]}), "it has no 'lr'"),
        (lambda model, groups: groups[1]["params"].append(model[0].weight), "given twice"),
        (lambda _, groups: groups[1]["params"].append(fresh(torch.float64)), "float64"),
        (
            lambda model, groups: groups[0].update(params=[model[0].weight, fresh()]),
            r"del optimizer\.state\[parameter\]",
        ),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_changes(change: Change, text: str) -> None:
    model, twin = model_of(), model_of()
    with AdamW(groups_of(model)) as optimizer, AdamW(groups_of(twin)) as other:
        for one, its in ((model, optimizer), (twin, other)):
            train(one, its, range(2))
            its.zero_grad()
            batch(one, 2).backward()
        params = [list(group["params"]) for group in optimizer.param_groups]
        change(model, optimizer.param_groups)
        with pytest.raises((ArgumentError, StateError), match=text):
            optimizer.step()
        del optimizer.param_groups[len(params) :]
        for group, its_own in zip(optimizer.param_groups, params, strict=True):
            group["params"][:] = its_own
        for its in (optimizer, other):
            its.step()
        assert optimizer.state_digests() == other.state_digests()


def test_memory_that_is_refused_ends_the_optimizer() -> None:
    model = model_of()
    with AdamW(groups_of(model)) as optimizer:
        train(model, optimizer, range(2))
        optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop(0))
        with (
            mock.patch("superoffload.optimizer.adamw_parts.assemble", side_effect=HostMemoryError("refused")),
            pytest.raises(RuntimeError, match="could not go on with its changed param_groups: refused"),
        ):
            optimizer.step()
        with pytest.raises(StateError, match="make a new one and load the last checkpoint"):
            optimizer.step()


def test_a_number_of_steps_may_be_shared_with_other_processes() -> None:
    """Which moves its memory."""
    model = model_of()
    with AdamW(model.parameters()) as optimizer:
        train(model, optimizer, range(2))
        kept = [optimizer.state[param]["step"].share_memory_() for param in model.parameters()]
        noise = [torch.full_like(step, 7777.0) for step in kept for _ in range(20)]  # where it was
        train(model, optimizer, range(2, 4))
        assert len(noise) == 20 * len(kept) and all(float(one) == 7777.0 for one in noise)
        assert [float(step) for step in kept] == [4.0] * len(kept)


@pytest.mark.parametrize("change", [lambda params: params.pop(0), lambda params: params.append(fresh())])
def test_names_that_no_longer_fit_a_group_are_not_given_to_other_parameters(change: Callable[[list[Any]], Any]) -> None:
    """The program has changed ``params`` alone, and not ``param_names``: they are called by their places then."""
    model = model_of()
    with AdamW(model.named_parameters(), threads=1) as optimizer:
        params = optimizer.param_groups[0]["params"]
        change(params)
        train(model, optimizer, range(1))
        names = [shard.name for shard in optimizer._engine.shards]
    assert names == [f"param_groups[0]['params'][{index}]" for index in range(len(params))]


def replaced_with_state(model: Any, optimizer: Optimizer) -> None:
    """A weight is pruned and grown, and its state with it."""
    layer = model[0]
    old = layer.weight

    def grown(tensor: Tensor, like: Tensor) -> Tensor:
        return torch.cat([tensor.detach()[:40], like])

    new = nn.Parameter(grown(old, 0.5 * old.detach()[8:16]))
    new.grad = None if old.grad is None else grown(old.grad, old.grad[8:16])
    state = optimizer.state[old]
    for name in ("exp_avg", "exp_avg_sq"):
        state[name] = state[name][:20]  # of another shape in between
        state[name] = torch.cat([state[name], torch.zeros(28, 16)])
    del optimizer.state[old]
    layer.weight = optimizer.param_groups[0]["params"][0] = new
    optimizer.state[new] = state


@pytest.mark.parametrize("before_backward", [True, False])
def test_groups_are_followed_as_in_torch(before_backward: bool) -> None:
    """More of these: tests/fuzz."""

    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        train(model, optimizer, range(2))
        optimizer.zero_grad()
        if before_backward:
            replaced_with_state(model, optimizer)
        batch(model, 2).backward()
        if not before_backward:
            replaced_with_state(model, optimizer)
        optimizer.step()
        train(model, optimizer, range(3, 6))

    assert check_scenario(scenario, max_grad_norm=100.0, bucket_numel=1024)["steps"] == 6
