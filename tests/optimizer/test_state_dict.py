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
    model_of,
    train,
)


def saved_and_read(state: dict[str, Any]) -> dict[str, Any]:
    """Through a file, as checkpoints go, without anything but tensors and plain values."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def two_groups(model: nn.Sequential) -> list[dict[str, Any]]:
    return [{"params": model[0].parameters(), "lr": 1e-2}, {"params": model[2:].parameters(), "weight_decay": 0.1}]


@pytest.mark.parametrize("saved_by", ["torch", "ours"])
def test_in_exchange_with_torch(saved_by: str) -> None:
    first, second = model_of(), model_of(seed=4)
    options: dict[str, Any] = {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-6}
    makes: list[Any] = [TorchAdamW, AdamW] if saved_by == "torch" else [AdamW, TorchAdamW]
    saved, loaded = makes[0](two_groups(first), **options), makes[1](two_groups(second))
    train(first, saved, range(4))
    second.load_state_dict(first.state_dict())
    loaded.load_state_dict(saved_and_read(saved.state_dict()))
    assert loaded.param_groups[-1]["betas"] == (0.8, 0.95)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        for name in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(torch.as_tensor(saved.state[a][name]), torch.as_tensor(loaded.state[b][name]))
    train(first, saved, range(4, 8))
    train(second, loaded, range(4, 8))
    assert_trained_alike(second, first)
    saved.close()
    loaded.close()


@pytest.mark.parametrize(
    ("form", "copied"), [({}, ""), ({"master_dtype": "split"}, "master"), ({"state_dtype": "8bit"}, "exp_avg")]
)
def test_without_a_copy(form: dict[str, Any], copied: str) -> None:
    """The saved state has the same values, and the next step changes what was not copied, as in torch."""
    first, second = model_of().bfloat16(), model_of(seed=4).bfloat16()
    with AdamW(first.parameters(), **form) as saved, AdamW(second.parameters(), **form) as loaded:
        train(first, saved, range(2))
        state_dict, copy = saved.state_dict(copy=False), saved.state_dict()
        second.load_state_dict(first.state_dict())
        loaded.load_state_dict(saved_and_read(state_dict))
        assert loaded.state_digests() == saved.state_digests()
        train(first, saved, range(2, 3))
        for at, values in state_dict["state"].items():
            for name, value in values.items():
                kept = copied != "" and name.startswith(copied)
                assert torch.equal(value, copy["state"][at][name]) == kept, (at, name)


def test_extra_group_values_survive_and_hooks_may_raise() -> None:
    first, second = model_of(), model_of()
    with AdamW(first.parameters()) as saved, AdamW(second.parameters()) as loaded:
        train(first, saved, range(2))
        saved.param_groups[0]["note"] = ["mine"]
        digests, called = saved.state_digests(), list[int]()

        def refuse(_: Any) -> None:
            raise RuntimeError("no memory for the copy")

        hook = saved.register_state_dict_pre_hook(refuse)
        with pytest.raises(RuntimeError, match="no memory for the copy"):
            saved.state_dict()
        hook.remove()
        saved.register_state_dict_post_hook(lambda _, state: called.append(len(state["state"])))
        loaded.load_state_dict(saved.state_dict())
        assert called == [6] and saved.state_digests() == digests
        assert loaded.param_groups[0]["note"] == ["mine"]
        assert loaded.param_groups[0]["note"] is not saved.param_groups[0]["note"]


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
