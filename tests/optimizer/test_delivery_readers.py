"""``delivery="on_demand"``: who reads or writes parameters besides the module's forward."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from superoffload import AdamW
from superoffload.errors import StateError
from tests.support.adamw_training import weights
from tests.support.delivery_loops import STEPS, Odd, in_flight, loss_of, made, odd, pending, plain_step

READS: dict[str, Callable[[Odd], object]] = {
    "a view": lambda model: model.sometimes.weight.detach()[1:].t().contiguous(),
    "its memory": lambda model: torch.from_numpy(model.sometimes.weight.detach().numpy()).sum(),
    "a write": lambda model: model.sometimes.weight.data.zero_(),
    "a list": lambda model: torch._foreach_mul([model.sometimes.weight], 2.0),
    "a copy": copy.deepcopy,
}


def test_check_reads_finds_other_readers() -> None:
    with in_flight() as (model, optimizer), optimizer.check_reads():
        for name, read in READS.items():
            with pytest.raises(StateError, match=r"(sometimes|embedding)\.weight.*synchronize\(\)"):
                read(model)
            assert pending(optimizer), name
        optimizer.synchronize()
        for read in READS.values():
            read(model)


def test_check_reads_lets_known_readers_pass() -> None:
    with in_flight() as (model, optimizer), optimizer.check_reads():
        torch.zeros_like(model.sometimes.weight)
        model.sometimes.weight.view(-1)
        model.frozen.weight.sum()
        for seed in range(3):
            plain_step(model, optimizer, seed)
        assert pending(optimizer)
        model.state_dict()
        optimizer.state_dict()
        plain_step(model, optimizer, 4)
        optimizer.refresh_masters()


def test_a_copy_of_the_model_is_independent() -> None:
    with in_flight() as (model, optimizer):
        optimizer.synchronize()
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        expected = weights(model)
        plain_step(model, optimizer, 3)
        assert pending(optimizer)
        for other in copies:
            with torch.no_grad():
                loss_of(other, 5)
            assert pending(optimizer), "its hooks do nothing"
            assert torch.equal(weights(other), expected)


@pytest.mark.parametrize("write", ["in place", "data"])
def test_a_write_to_an_undelivered_parameter_is_kept_and_reported(write: str) -> None:
    with in_flight() as (model, optimizer):
        weight = model.sometimes.weight
        if write == "in place":
            with torch.no_grad():
                weight.fill_(0.25)
        else:
            weight.data = torch.full_like(weight, 0.25)
        with pytest.raises(StateError, match=r"sometimes\.weight: written after step\(\), before .* delivered"):
            loss_of(model, 5)
        assert torch.equal(weight, torch.full_like(weight, 0.25))
        others = [p for p in model.parameters() if p.requires_grad and p is not weight]
        loss_of(model, 5)  # reported once
        for param in others:
            assert torch.equal(param, optimizer.state[param]["master"])
        optimizer.zero_grad()
        optimizer.refresh_written()
        assert torch.equal(optimizer.state[weight]["master"], weight)


def test_a_converted_model_is_refused_and_its_masters_stay() -> None:
    twin = odd()
    with made(twin, "eager") as eager:
        for seed in range(2):
            plain_step(twin, eager, seed)
        expected = eager.state_digests()
    with in_flight() as (model, optimizer):
        model.bfloat16()
        for use in (lambda: loss_of(model, 5), optimizer.synchronize):
            with pytest.raises(StateError, match="make a new optimizer after converting"):
                use()
        found = optimizer.state_digests()
        assert all(found[name] == expected[name] for name in ("master", "exp_avg", "exp_avg_sq"))


def test_a_retained_graph_cannot_be_used_after_step() -> None:
    """As with eager delivery and in torch: its saved parameters are old."""
    model = odd()
    with made(model, "on_demand") as optimizer:
        plain_step(model, optimizer, 0)
        loss = loss_of(model, 1)
        loss.backward(retain_graph=True)
        optimizer.step()
        assert pending(optimizer)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_closing_delivers_and_takes_the_hooks_away() -> None:
    with in_flight() as (model, optimizer):
        pass
    for param in model.parameters():
        if param.requires_grad:
            assert torch.equal(param, optimizer.state[param]["master"])
    for module in model.modules():
        assert not module._forward_pre_hooks and not module._state_dict_pre_hooks
        assert not module._load_state_dict_pre_hooks
    loss_of(model, 5).backward()


def test_an_optimizer_that_is_let_go_delivers_first() -> None:
    model = odd()
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], delivery="on_demand", module=model, lr=1e-2)
    for seed in range(2):
        plain_step(model, optimizer, seed)
    masters = {param: state["master"] for param, state in optimizer.state.items()}
    del optimizer
    for param, master in masters.items():
        assert torch.equal(param, master)
    loss_of(model, 5)


def test_two_optimizers_share_a_module() -> None:
    def run(delivery: str) -> list[dict[str, str]]:
        model = odd()
        options: dict[str, Any] = {"delivery": delivery, "module": model, "threads": 1, "lr": 1e-2}
        blocks = list(model.blocks.parameters())
        taken = {id(param) for param in blocks}
        rest = [p for p in model.parameters() if p.requires_grad and id(p) not in taken]
        with AdamW(blocks, **options) as first, AdamW(rest, **options) as second:
            for seed in range(STEPS):
                first.zero_grad()
                second.zero_grad()
                loss_of(model, seed).backward()
                first.step()
                second.step()
            return [first.state_digests(), second.state_digests()]

    assert run("eager") == run("on_demand")
