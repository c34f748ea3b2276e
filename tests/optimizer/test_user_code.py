"""What people do around an optimizer and no other file covers, by ours in every mode and by torch.optim.AdamW."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from superoffload import AdamW
from tests.support.adamw_training import (
    Optimizer,
    assert_trained_alike,
    batch,
    check_scenario,
    grads_of,
    model_of,
    nothing_shows,
    train,
)
from tests.support.over_stand_in import only_over_stand_in
from tests.support.refusal import Refusal
from tests.support.schedulers import SCHEDULERS


@pytest.mark.over_stand_in
@only_over_stand_in(name=("StepLR", "OneCycleLR"))
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # on purpose
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_of_torch(name: str) -> None:
    """Each steps behind step() and, later, between backward and step()."""

    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        scheduler = SCHEDULERS[name](optimizer)
        for seed in range(6):
            optimizer.zero_grad()
            loss = batch(model, seed)
            loss.backward()
            arguments = (1.0,) if name == "ReduceLROnPlateau" else ()
            if seed < 3:
                optimizer.step()
            scheduler.step(*arguments)
            if seed >= 3:
                optimizer.step()

    check_scenario(scenario)
    public = {name for name in lr_scheduler.__all__ if isinstance(getattr(lr_scheduler, name), type)}
    assert public - {"LRScheduler", "_LRScheduler"} <= set(SCHEDULERS)


@pytest.mark.over_stand_in(brings_back="always")
@pytest.mark.parametrize(("unscale_by_hand", "max_grad_norm"), [(False, None), (True, 0.5)])
def test_grad_scaler(unscale_by_hand: bool, max_grad_norm: float | None) -> None:
    """Its unscale_() edits gradients without a trace in their version counters."""
    scales = []

    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        by_hand = unscale_by_hand or not isinstance(optimizer, AdamW)  # torch's clips what is unscaled
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        for seed in range(10):
            optimizer.zero_grad()
            loss = batch(model, seed)
            scaler.scale(loss * math.inf if seed == 4 else loss).backward()
            if by_hand:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        scales.append(scaler.get_scale())

    stats = check_scenario(scenario, max_grad_norm=max_grad_norm)
    assert stats["skipped_steps"] == 1
    assert len(set(scales)) == 1
    if not unscale_by_hand and max_grad_norm is None:
        assert stats["buckets_committed"] > 0, "the scale of the last step was expected"


def test_grad_scaler_skips_although_the_infinity_was_replaced() -> None:
    model = model_of()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with AdamW(model.parameters(), speculation="always") as optimizer, nothing_shows(model):
        scaler.scale(batch(model, 0) * math.inf).backward()
        scaler.unscale_(optimizer)
        for grad in grads_of(model):
            grad.nan_to_num_(0.0, 1.0, -1.0)
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.stats()["skipped_steps"] == 1
    assert scaler.get_scale() == 2.0


def halve(optimizer: Any, *_: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                param.grad.mul_(0.5)


@pytest.mark.over_stand_in(brings_back="always")
def test_optimizer_hooks() -> None:
    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        calls: list[str] = []
        optimizer.register_step_pre_hook(halve)
        optimizer.register_step_post_hook(lambda *_: calls.append("post"))
        everywhere = register_optimizer_step_pre_hook(lambda *_: calls.append("global"))
        try:
            train(model, optimizer, range(4))
        finally:
            everywhere.remove()
        assert calls == ["global", "post"] * 4

    check_scenario(scenario, max_grad_norm=0.5)


def test_an_empty_param_group() -> None:
    """As a LoRA run has, whose parameters all decay."""
    runs = []
    for kind in (AdamW, torch.optim.AdamW):
        model = model_of()
        params: Any = [{"params": list(model.parameters())}, {"params": [], "weight_decay": 0.0}]
        optimizer: Any = kind(params)
        train(model, optimizer, range(3))
        assert kind is not AdamW or len(optimizer.state_dict()["param_groups"]) == 2
        runs.append(model)
        if kind is AdamW:
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.add_param_group({"params": []})
            optimizer.close()
    assert_trained_alike(*runs)
    with pytest.raises(ValueError, match="only empty param groups"):
        AdamW([{"params": []}])


@pytest.mark.over_stand_in
@pytest.mark.refused("an optimizer with worker threads cannot be copied or pickled; save its state_dict() instead")
def test_copies_of_the_optimizer(refusal: Refusal) -> None:
    model = model_of()
    with AdamW(model.parameters(), threads=1) as optimizer:
        train(model, optimizer, range(1))
        with refusal():
            copy.deepcopy(optimizer)
        train(model, optimizer, range(1))
