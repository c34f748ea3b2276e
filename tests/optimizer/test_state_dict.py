"""state_dict() and load_state_dict(): exact, at any moment, and in exchange with torch.optim.AdamW."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from superoffload import AdamW, CPUAdamW
from superoffload.errors import ArgumentError
from tests.support.adamw_training import (
    TorchAdamW,
    assert_trained_alike,
    batch,
    check_counters,
    model_of,
    pair,
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


@pytest.mark.parametrize(
    ("dtype", "mode"), [(torch.float32, "never"), (torch.bfloat16, "always"), (torch.float16, "always")]
)
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


def test_where_model_and_masters_disagree_the_model_wins() -> None:
    first, second = model_of(torch.bfloat16), model_of(torch.bfloat16, seed=4)
    with AdamW(first.parameters(), lr=1e-2) as saved, AdamW(second.parameters(), lr=0.0) as loaded:
        train(first, saved, range(4))
        before = weights(second)
        loaded.load_state_dict(saved.state_dict())
        loaded.param_groups[0]["lr"] = 0.0
        train(second, loaded, [1])
        assert torch.equal(weights(second), before)


def assert_same_state(state: dict[str, Any], expected: dict[str, Any]) -> None:
    assert state["param_groups"] == expected["param_groups"]
    for position, values in expected["state"].items():
        for name, value in values.items():
            assert torch.equal(state["state"][position][name], value)


def test_saved_between_backward_and_step() -> None:
    """It is the state of the last finished step, and the step goes on; later steps do not change what was saved."""
    with pair() as (model, optimizer, twin, plain):
        train(model, optimizer, range(3))
        train(twin, plain, range(3))
        expected = saved_and_read(optimizer.state_dict())
        digests = optimizer.state_digests()
        for one, its in ((model, optimizer), (twin, plain)):
            its.zero_grad()
            batch(one, 5).backward()
        for bucket in optimizer._engine.buckets:
            assert bucket.running is not None
            bucket.running.wait()
        assert optimizer.state_digests() == digests
        state = optimizer.state_dict()
        assert_same_state(state, expected)
        optimizer.step()
        plain.step()
        assert_same_state(state, expected)
        assert optimizer.state_digests() == plain.state_digests()
        check_counters(optimizer)


def two_groups(model: nn.Sequential) -> list[dict[str, Any]]:
    return [{"params": model[0].parameters(), "lr": 1e-2}, {"params": model[2:].parameters(), "weight_decay": 0.1}]


def test_ours_loads_what_torch_saved() -> None:
    first, second = model_of(), model_of(seed=4)
    theirs = TorchAdamW(two_groups(first), lr=3e-3, betas=(0.8, 0.95), eps=1e-6)
    train(first, theirs, range(4))
    with AdamW(two_groups(second), speculation="always") as ours:
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


def test_torch_loads_what_ours_saved() -> None:
    first, second = model_of(), model_of(seed=4)
    with AdamW(two_groups(first), lr=3e-3, betas=(0.8, 0.95), eps=1e-6, speculation="always") as ours:
        train(first, ours, range(4))
        theirs = TorchAdamW(two_groups(second))
        second.load_state_dict(first.state_dict())
        theirs.load_state_dict(saved_and_read(ours.state_dict()))
        train(first, ours, range(4, 8))
        train(second, theirs, range(4, 8))
        assert_trained_alike(first, second)


def test_a_parameter_that_the_checkpoint_does_not_have_starts_afresh() -> None:
    """torch saves no state for parameters that never had a gradient."""
    first, second = model_of(), model_of()
    theirs = TorchAdamW(first.parameters())
    first[0].requires_grad_(False)
    train(first, theirs, range(3))
    assert len(theirs.state_dict()["state"]) == 4
    with AdamW(second.parameters(), speculation="always") as ours:
        theirs_too = TorchAdamW(second.parameters())
        theirs_too.load_state_dict(ours.state_dict())  # without steps
        train(second, ours, range(5))
        second.load_state_dict(first.state_dict())
        ours.load_state_dict(theirs.state_dict())
        first[0].requires_grad_(True)
        train(first, theirs, range(3))
        train(second, ours, range(3))
        assert [float(ours.state[p]["step"]) for p in second.parameters()] == [3, 3, 6, 6, 6, 6]
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


def test_hooks_of_state_dict_are_called_and_may_raise() -> None:
    model = model_of()
    with AdamW(model.parameters(), threads=1) as optimizer:
        train(model, optimizer, range(2))
        digests = optimizer.state_digests()

        def refuse(_: Any) -> None:
            raise RuntimeError("no memory for the copy")

        hook = optimizer.register_state_dict_pre_hook(refuse)
        with pytest.raises(RuntimeError, match="no memory for the copy"):
            optimizer.state_dict()
        hook.remove()
        assert optimizer.state_digests() == digests
        called: list[int] = []
        optimizer.register_state_dict_post_hook(lambda _, state: called.append(len(state["state"])))
        optimizer.state_dict()
        assert called == [6]
        train(model, optimizer, range(2, 3))


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


def test_a_value_put_into_the_state_counts() -> None:
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
