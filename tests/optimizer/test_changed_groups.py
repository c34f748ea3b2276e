"""Programs change ``param_groups`` by hand: as in torch, the group that has a parameter says how it is stepped."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW, checkpoints
from superoffload.errors import ArgumentError, HostMemoryError, StateError
from tests.support.adamw_training import TorchAdamW, assert_trained_alike, batch, check_counters, model_of, train

Optimizer = Any
Change = Callable[[Any, Optimizer], None]


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [
        {"params": params[:2], "lr": 1e-2},
        {"params": params[2:4], "lr": 1e-3, "weight_decay": 0.0},
        {"params": params[4:], "lr": 3e-3, "betas": (0.8, 0.9)},
    ]


def removed(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["params"].pop(1)


def moved(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop(0))


def moved_to_a_group_of_its_own(model: nn.Module, optimizer: Optimizer) -> None:
    param = optimizer.param_groups[0]["params"].pop(0)
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [param], "lr": 0.05})


def groups_reversed(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.param_groups.reverse()


def params_reversed(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["params"].reverse()


def groups_merged(model: nn.Module, optimizer: Optimizer) -> None:
    first, *others = optimizer.param_groups
    first["params"] += [param for group in others for param in group["params"]]
    del optimizer.param_groups[1:]


def groups_cleared_and_added(model: Any, optimizer: Optimizer) -> None:
    optimizer.param_groups.clear()
    optimizer.add_param_group({"params": [model[3].weight]})


def replaced(model: Any, optimizer: Optimizer) -> None:
    """With a fresh state, in the place of a bias."""
    layer = model[0]
    old, new = layer.bias, nn.Parameter(0.5 * layer.bias.detach())
    new.grad = old.grad
    layer.bias = optimizer.param_groups[0]["params"][1] = new
    optimizer.state.pop(old, None)


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


CHANGES = [
    removed,
    moved,
    moved_to_a_group_of_its_own,
    groups_reversed,
    params_reversed,
    groups_merged,
    groups_cleared_and_added,
    replaced,
    replaced_with_state,
]


def run(change: Change, before_backward: bool, make: Callable[[list[dict[str, Any]]], Optimizer]) -> nn.Module:
    model = model_of()
    optimizer = make(groups_of(model))
    train(model, optimizer, range(2))
    optimizer.zero_grad()
    if before_backward:
        change(model, optimizer)
    batch(model, 2).backward()
    if not before_backward:
        change(model, optimizer)
    optimizer.step()
    for param in model.parameters():  # also those that the optimizer has no more
        param.grad = None
    train(model, optimizer, range(3, 6))
    optimizer.close()
    return model


@pytest.mark.parametrize("before_backward", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_groups_are_followed_as_in_torch(change: Change, before_backward: bool) -> None:
    digests = []
    for mode in ("always", "never"):
        made: list[AdamW] = []

        def make(groups: list[dict[str, Any]], mode: str = mode, made: list[AdamW] = made) -> AdamW:
            made.append(AdamW(groups, speculation=mode, max_grad_norm=100.0, threads=2, bucket_numel=1024))
            return made[-1]

        ours = run(change, before_backward, make)
        check_counters(made[0])
        assert made[0].stats()["steps"] == 6
        digests.append(made[0].state_digests())
    assert digests[0] == digests[1]
    theirs = run(change, before_backward, lambda groups: TorchAdamW(groups, max_grad_norm=100.0))
    assert_trained_alike(ours, theirs)


ON_DEMAND = {"delivery": "on_demand"}
FORMS: list[tuple[dict[str, Any], Change]] = [
    ({"state_dtype": "bf16"}, moved),
    ({"state_dtype": "8bit", "master_dtype": "split"}, groups_reversed),
    ({"accumulate_dtype": "fp32"}, moved),
    (ON_DEMAND, groups_reversed),
    (ON_DEMAND, removed),
]


@pytest.mark.parametrize(("options", "change"), FORMS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_state_of_every_form_stays(options: dict[str, Any], change: Change) -> None:
    if "accumulate_dtype" in options and not hasattr(Tensor, "grad_dtype"):
        pytest.skip("needs torch 2.10")
    digests = []
    for mode in ("always", "never"):
        model = model_of(torch.bfloat16)
        with AdamW(groups_of(model), speculation=mode, bucket_numel=1024, model=model, **options) as optimizer:
            train(model, optimizer, range(2))
            before = {p: optimizer.state[p]["exp_avg"].clone() for p in model.parameters()}
            change(model, optimizer)
            optimizer.synchronize()
            assert all(torch.equal(optimizer.state[p]["exp_avg"], value) for p, value in before.items())
            train(model, optimizer, range(2, 4))
            digests.append(optimizer.state_digests())
    assert digests[0] == digests[1]


def test_a_parameter_that_comes_back_has_its_state(tmp_path: Path) -> None:
    """Written while it was in no group, too. Meanwhile it is neither saved nor stepped."""

    def rest(model: nn.Module, optimizer: Optimizer) -> None:
        param = optimizer.param_groups[0]["params"].pop(0)
        value = param.detach().clone()
        train(model, optimizer, range(3, 5))
        assert torch.equal(param, value)
        if isinstance(optimizer, AdamW):
            assert sorted(optimizer.state_dict()["state"]) == list(range(5))
            assert param in optimizer.state
            checkpoints.save(tmp_path / str(len(list(tmp_path.iterdir()))), model, optimizer)
        with torch.no_grad():
            param.mul_(0.5)
        optimizer.param_groups[2]["params"].append(param)
        train(model, optimizer, range(5, 6))

    for before_backward in (True, False):
        ours = run(rest, before_backward, lambda groups: AdamW(groups, speculation="always", bucket_numel=1024))
        theirs = run(rest, before_backward, TorchAdamW)
        assert_trained_alike(ours, theirs)


def test_entries_and_tensors_that_a_program_has_stay_those_of_the_state() -> None:
    model, twin = model_of(), model_of()
    with (
        AdamW(groups_of(model), speculation="always", bucket_numel=1024) as optimizer,
        AdamW(groups_of(twin), speculation="never") as other,
        pytest.warns(RuntimeWarning, match="keeps a tensor"),
    ):
        held = []
        for one, its in ((model, optimizer), (twin, other)):
            train(one, its, range(2))
            params = list(one.parameters())
            entry, tensor = its.state[params[0]], its.state[params[2]]["exp_avg"]
            moved(one, its)
            its.zero_grad()
            batch(one, 2).backward()
            its.step()
            assert its.state[params[0]] is entry and its.state[params[2]]["exp_avg"] is tensor
            its.zero_grad()
            batch(one, 3).backward()
            entry["exp_avg"].mul_(0.5)
            tensor.mul_(0.5)
            its.step()
            held.append((entry["exp_avg"].clone(), tensor))
        assert torch.equal(held[0][0], held[1][0]) and torch.equal(held[0][1], held[1][1])
        assert optimizer.state_digests() == other.state_digests()


def without_lr(model: nn.Module, optimizer: AdamW) -> None:
    optimizer.param_groups.append({"params": [nn.Parameter(torch.ones(3))]})


def one_twice(model: nn.Module, optimizer: AdamW) -> None:
    optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"][0])


def of_another_dtype(model: nn.Module, optimizer: AdamW) -> None:
    optimizer.param_groups[1]["params"].append(nn.Parameter(torch.ones(3, dtype=torch.float64)))


def one_for_another(model: nn.Module, optimizer: AdamW) -> None:
    optimizer.param_groups[0]["params"][1] = nn.Parameter(torch.ones(3))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (without_lr, ArgumentError, "it has no 'lr'"),
        (one_twice, ArgumentError, "given twice"),
        (of_another_dtype, ArgumentError, "float64"),
        (one_for_another, StateError, r"del optimizer\.state\[parameter\]"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_changes(change: Change, error: type[Exception], text: str) -> None:
    model, twin = model_of(), model_of()
    with AdamW(groups_of(model)) as optimizer, AdamW(groups_of(twin)) as other:
        for one, its in ((model, optimizer), (twin, other)):
            train(one, its, range(2))
            its.zero_grad()
            batch(one, 2).backward()
        params = [list(group["params"]) for group in optimizer.param_groups]
        change(model, optimizer)
        with pytest.raises(error, match=text):
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
        moved(model, optimizer)
        with (
            mock.patch("superoffload.optimizer.adamw_parts.assemble", side_effect=HostMemoryError("refused")),
            pytest.raises(RuntimeError, match="could not go on with its changed param_groups: refused"),
        ):
            optimizer.step()
        with pytest.raises(StateError, match="make a new one and load the last checkpoint"):
            optimizer.step()


def test_names_are_left_alone_where_a_program_moves_parameters_without_them() -> None:
    model = model_of()
    with AdamW([{"params": [*model.named_parameters()][:3]}, {"params": [*model.named_parameters()][3:]}]) as optimizer:
        train(model, optimizer, range(2))
        moved(model, optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(model, optimizer, range(2, 4))
        assert all(float(optimizer.state[param]["step"]) == 4 for param in model.parameters())


@pytest.mark.parametrize(("speculation", "when"), [("always", "in none"), ("never", "in a group")])
def test_a_number_of_steps_that_a_program_keeps_stays_that_of_the_state(speculation: str, when: str) -> None:
    models = [model_of(), model_of()]
    optimizers: list[Any] = [TorchAdamW(groups_of(models[0])), AdamW(groups_of(models[1]), speculation=speculation)]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, range(2))
        params = list(model.parameters())
        kept = [optimizer.state[param]["step"] for param in params]
        groups_reversed(model, optimizer)
        train(model, optimizer, range(2, 4))
        assert [float(step) for step in kept] == [4.0] * len(params)
        out = optimizer.param_groups[0]["params"].pop() if when == "in none" else params[-1]
        train(model, optimizer, range(4, 5))
        for step in kept:
            step.fill_(1.0)
        if when == "in none":
            train(model, optimizer, range(5, 6))
            optimizer.param_groups[0]["params"].append(out)
        train(model, optimizer, range(6, 8))
        assert [float(optimizer.state[param]["step"]) for param in params] == [float(step) for step in kept]
    optimizers[1].close()
    assert_trained_alike(*models)


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
