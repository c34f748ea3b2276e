"""state_dict() and load_state_dict(): exact, at any moment, and in exchange with torch.optim.AdamW."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from superoffload import AdamW, CPUAdamW
from superoffload.errors import ArgumentError
from tests.support.adamw_training import (
    DTYPES,
    TorchAdamW,
    assert_trained_alike,
    batch,
    check_counters,
    model_of,
    train,
    weights,
)


def saved_and_read(state: dict[str, Any]) -> dict[str, Any]:
    """Through a file, as checkpoints go, without anything but tensors and plain values."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["always", "never"])
def test_round_trip(dtype: torch.dtype, mode: str) -> None:
    first, second = model_of(dtype), model_of(dtype, seed=4)
    with (
        AdamW(first.parameters(), lr=1e-2, speculation=mode) as saved,
        AdamW(second.parameters(), lr=1e-4, weight_decay=0.5, speculation="always") as loaded,
    ):
        train(first, saved, range(4))
        train(second, loaded, range(2))
        second.load_state_dict(first.state_dict())
        loaded.load_state_dict(saved_and_read(saved.state_dict()))
        assert loaded.state_digests() == saved.state_digests()
        assert loaded.param_groups[0]["lr"] == 1e-2
        for model, optimizer in ((first, saved), (second, loaded)):
            train(model, optimizer, range(4, 8))
        assert loaded.state_digests() == saved.state_digests()
        check_counters(loaded)


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_masters_do_not_depend_on_what_is_loaded_first(order: str) -> None:
    first, second = model_of(torch.bfloat16), model_of(torch.bfloat16, seed=4)
    with AdamW(first.parameters(), lr=1e-2) as saved, AdamW(second.parameters()) as loaded:
        train(first, saved, range(4))
        if order == "model first":
            second.load_state_dict(first.state_dict())
        loaded.load_state_dict(saved.state_dict())
        if order == "optimizer first":
            second.load_state_dict(first.state_dict())
        for model, optimizer in ((first, saved), (second, loaded)):
            train(model, optimizer, [5])
        assert loaded.state_digests() == saved.state_digests()


def test_where_model_and_masters_disagree_the_model_wins() -> None:
    first, second = model_of(torch.bfloat16), model_of(torch.bfloat16, seed=4)
    with AdamW(first.parameters(), lr=1e-2) as saved, AdamW(second.parameters(), lr=0.0) as loaded:
        train(first, saved, range(4))
        before = weights(second)
        loaded.load_state_dict(saved.state_dict())
        loaded.param_groups[0]["lr"] = 0.0
        train(second, loaded, [1])
        assert torch.equal(weights(second), before)


@pytest.mark.parametrize("mode", ["always", "never"])
def test_saved_between_backward_and_step(mode: str) -> None:
    """It is the state of the last finished step, and the step goes on."""
    models = [model_of() for _ in range(2)]
    with (
        AdamW(models[0].parameters(), speculation=mode) as optimizer,
        AdamW(models[1].parameters(), speculation=mode) as plain,
    ):
        for model, one in zip(models, (optimizer, plain), strict=True):
            train(model, one, range(3))
        expected = optimizer.state_dict()
        for model, one in zip(models, (optimizer, plain), strict=True):
            one.zero_grad()
            batch(model, 5).backward()
        state = optimizer.state_dict()
        assert_same_state(state, expected)
        for one in (optimizer, plain):
            one.step()
        assert_same_state(state, expected)
        assert optimizer.state_digests() == plain.state_digests()
        check_counters(optimizer)


def assert_same_state(state: dict[str, Any], expected: dict[str, Any]) -> None:
    assert state["param_groups"] == expected["param_groups"]
    for position, values in expected["state"].items():
        for name, value in values.items():
            assert torch.equal(state["state"][position][name], value)


def test_loaded_between_backward_and_step_the_gradients_are_still_there() -> None:
    models = [model_of() for _ in range(2)]
    with AdamW(models[0].parameters(), speculation="always") as ours:
        theirs = TorchAdamW(models[1].parameters())
        one: Any
        for model, one in zip(models, (ours, theirs), strict=True):
            train(model, one, range(3))
            state = one.state_dict()
            state = {**state, "state": {k: {n: v.clone() for n, v in s.items()} for k, s in state["state"].items()}}
            train(model, one, range(3))
            one.zero_grad()
            batch(model, 5).backward()
            one.load_state_dict(state)
            one.step()
        assert_trained_alike(*models)
        check_counters(ours)


def two_groups(model: nn.Sequential) -> list[dict[str, Any]]:
    return [{"params": model[0].parameters(), "lr": 1e-2}, {"params": model[2:].parameters(), "weight_decay": 0.1}]


def one_group(model: nn.Sequential) -> list[dict[str, Any]]:
    return [{"params": list(model.parameters())}]


@pytest.mark.parametrize("groups", [one_group, two_groups])
def test_ours_loads_what_torch_saved(groups: Callable[[nn.Sequential], list[dict[str, Any]]]) -> None:
    first, second = model_of(), model_of(seed=4)
    theirs = TorchAdamW(groups(first), lr=3e-3, betas=(0.8, 0.95), eps=1e-6)
    train(first, theirs, range(4))
    with AdamW(groups(second), speculation="always") as ours:
        second.load_state_dict(first.state_dict())
        ours.load_state_dict(saved_and_read(theirs.state_dict()))
        assert ours.param_groups[-1]["betas"] == (0.8, 0.95)
        for theirs_p, ours_p in zip(first.parameters(), second.parameters(), strict=True):
            assert torch.equal(ours.state[ours_p]["exp_avg"], theirs.state[theirs_p]["exp_avg"])
            assert torch.equal(ours.state[ours_p]["exp_avg_sq"], theirs.state[theirs_p]["exp_avg_sq"])
            assert ours.state[ours_p]["step"] == 4
        train(first, theirs, range(4, 8))
        train(second, ours, range(4, 8))
        assert_trained_alike(second, first)


@pytest.mark.parametrize("groups", [one_group, two_groups])
def test_torch_loads_what_ours_saved(groups: Callable[[nn.Sequential], list[dict[str, Any]]]) -> None:
    first, second = model_of(), model_of(seed=4)
    with AdamW(groups(first), lr=3e-3, betas=(0.8, 0.95), eps=1e-6, speculation="always") as ours:
        train(first, ours, range(4))
        theirs = TorchAdamW(groups(second))
        second.load_state_dict(first.state_dict())
        theirs.load_state_dict(saved_and_read(ours.state_dict()))
        train(first, ours, range(4, 8))
        train(second, theirs, range(4, 8))
        assert_trained_alike(first, second)


def test_torch_loads_a_state_without_steps() -> None:
    first, second = model_of(), model_of()
    with AdamW(first.parameters()) as ours:
        theirs = TorchAdamW(second.parameters())
        theirs.load_state_dict(ours.state_dict())
        train(first, ours, range(3))
        train(second, theirs, range(3))
        assert_trained_alike(first, second)


def test_a_parameter_that_the_checkpoint_does_not_have_starts_afresh() -> None:
    """torch saves no state for parameters that never had a gradient."""
    first, second = model_of(), model_of()
    theirs = TorchAdamW(first.parameters())
    first[0].requires_grad_(False)
    train(first, theirs, range(3))
    assert len(theirs.state_dict()["state"]) == 4
    with AdamW(second.parameters(), speculation="always") as ours:
        train(second, ours, range(5))
        second.load_state_dict(first.state_dict())
        ours.load_state_dict(theirs.state_dict())
        first[0].requires_grad_(True)
        train(first, theirs, range(3))
        train(second, ours, range(3))
        assert [float(ours.state[p]["step"]) for p in second.parameters()] == [3, 3, 6, 6, 6, 6]
        assert_trained_alike(second, first)


def test_the_state_of_a_frozen_parameter_is_loaded_too() -> None:
    first, second = model_of(), model_of()
    theirs = TorchAdamW(first.parameters())
    train(first, theirs, range(3))
    second[0].requires_grad_(False)
    with AdamW(second.parameters(), speculation="always") as ours:
        second.load_state_dict(first.state_dict())
        ours.load_state_dict(theirs.state_dict())
        second[0].requires_grad_(True)
        train(first, theirs, range(3))
        train(second, ours, range(3))
        assert_trained_alike(second, first)


def test_extra_group_values_and_scheduler_state_survive() -> None:
    first, second = model_of(), model_of()
    with AdamW(first.parameters(), lr=1e-2) as saved, AdamW(second.parameters(), lr=1e-2) as loaded:
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(saved, 10)
        for seed in range(3):
            train(first, saved, [seed])
            scheduler.step()
        saved.param_groups[0]["note"] = ["mine"]
        second.load_state_dict(first.state_dict())
        loaded.load_state_dict(saved.state_dict())
        again = torch.optim.lr_scheduler.CosineAnnealingLR(loaded, 10)
        again.load_state_dict(scheduler.state_dict())
        assert loaded.param_groups[0]["note"] == ["mine"]
        assert loaded.param_groups[0]["note"] is not saved.param_groups[0]["note"]
        for model, optimizer, its in ((first, saved, scheduler), (second, loaded, again)):
            train(model, optimizer, [5])
            its.step()
            train(model, optimizer, [6])
        assert loaded.state_digests() == saved.state_digests()


def test_a_saved_state_does_not_change_with_later_steps() -> None:
    model = model_of()
    with AdamW(model.parameters(), speculation="always") as optimizer:
        train(model, optimizer, range(2))
        state = optimizer.state_dict()
        kept = saved_and_read(state)
        train(model, optimizer, range(3))
        assert_same_state(state, kept)


def test_hooks_of_state_dict_are_called() -> None:
    model = model_of()
    with AdamW(model.parameters()) as optimizer:
        called = []
        optimizer.register_state_dict_post_hook(lambda _, state: called.append(len(state["state"])))
        optimizer.state_dict()
        assert called == [6]


def test_layout() -> None:
    model = model_of(torch.bfloat16)
    with AdamW(model.named_parameters(), lr=1e-2) as optimizer:
        train(model, optimizer, range(2))
        state = optimizer.state_dict()
        theirs = torch.optim.AdamW(model.named_parameters())
        assert set(theirs.state_dict()["param_groups"][0]) <= set(state["param_groups"][0])
        assert state["param_groups"][0]["params"] == list(range(6))
        for position, param in enumerate(model.parameters()):
            values = state["state"][position]
            assert set(values) == {"step", "exp_avg", "exp_avg_sq", "master"}
            assert values["step"].shape == ()
            assert values["step"].dtype is torch.float32
            for name in ("exp_avg", "exp_avg_sq", "master"):
                assert values[name].shape == param.shape
                assert values[name].dtype is torch.float32


def test_a_state_dict_that_cannot_be_made_leaves_the_optimizer_usable() -> None:
    """A user's hook raises, or the system has no memory for the copy."""
    model = model_of()
    optimizer = AdamW(model.parameters(), threads=1)
    train(model, optimizer, range(2))
    digests = optimizer.state_digests()

    def refuse(_: Any) -> None:
        raise RuntimeError("no memory for the copy")

    hook = optimizer.register_state_dict_pre_hook(refuse)
    with pytest.raises(RuntimeError, match="no memory for the copy"):
        optimizer.state_dict()
    hook.remove()
    assert optimizer.state_digests() == digests
    assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))
    train(model, optimizer, range(2, 3))
    optimizer.close()


@pytest.mark.parametrize("kind", [AdamW, CPUAdamW])
def test_named_parameters_in_another_order_are_refused(kind: Any) -> None:
    """State goes by position: each would get the moments of another one, and its name."""
    named = [("a", nn.Parameter(torch.ones(4))), ("b", nn.Parameter(torch.ones(4)))]
    saved = kind(named).state_dict()
    other = kind(named[::-1])
    with pytest.raises(ArgumentError, match=r"parameter 0 of group 0 is 'a', the optimizer has 'b' there"):
        other.load_state_dict(saved)
    assert other.param_groups[0]["param_names"] == ["b", "a"]
    other.load_state_dict(kind([(f"new.{name}", param) for name, param in named]).state_dict())
    other.close()


@pytest.mark.parametrize("options", [{}, {"master_dtype": "split"}, {"state_dtype": "8bit"}, {"state_dtype": "bf16"}])
def test_state_that_a_framework_moved_away_and_back_stays_the_optimizers(options: dict[str, Any]) -> None:
    """As verl does with ``optimizer_offload``: it puts copies in the place of every tensor of the state."""
    moved, still = model_of(torch.bfloat16), model_of(torch.bfloat16)
    with AdamW(moved.parameters(), **options) as optimizer, AdamW(still.parameters(), **options) as other:
        for step in range(3):
            train(moved, optimizer, range(step, step + 1))
            for values in optimizer.state.values():
                for name, value in values.items():
                    values[name] = value.clone()
        train(still, other, range(3))
        state, expected = optimizer.state_dict()["state"], other.state_dict()["state"]
        for number, values in expected.items():
            for name, value in values.items():
                assert torch.equal(state[number][name], value), name
        assert optimizer.state_digests() == other.state_digests()


def test_a_value_put_into_the_state_counts(tmp_path: Path) -> None:
    model = model_of()
    with AdamW(model.parameters()) as optimizer:
        train(model, optimizer, range(2))
        values = optimizer.state[next(model.parameters())]
        kept = values["exp_avg"]
        values["exp_avg"] = nn.Parameter(torch.zeros_like(kept))
        assert values["exp_avg"] is kept and not kept.any() and not kept.requires_grad
        forms: list[Any] = [torch.tensor(10.0), torch.tensor([10.0]), 10.0]
        for steps in forms:
            values["step"] = steps
            assert float(values["step"]) == 10
            values["step"] = 2
        values["step"] = 7
        state = optimizer.state_dict()["state"][0]
        assert not state["exp_avg"].any() and float(state["step"]) == 7
        torch.save(values, tmp_path / "values.pt")
        assert torch.equal(torch.load(tmp_path / "values.pt")["exp_avg_sq"], values["exp_avg_sq"])
