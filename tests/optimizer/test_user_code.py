"""What people do around an optimizer and no other file covers, by ours in every mode and by torch.optim.AdamW."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler, swa_utils
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

from superoffload import AdamW
from superoffload.engine.schedule import MODES
from tests.support.adamw_training import (
    Optimizer,
    TorchAdamW,
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
def test_loss_scaled_by_hand() -> None:
    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        for seed in range(4):
            optimizer.zero_grad()
            (batch(model, seed) * 4096.0).backward()
            for param in model.parameters():
                assert param.grad is not None
                param.grad.div_(4096.0)
            optimizer.step()

    check_scenario(scenario, max_grad_norm=0.5)


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


@pytest.mark.over_stand_in
def test_autocast() -> None:
    """The forward rounds to bfloat16, which makes of rounding errors in weights larger ones in gradients."""

    def run(optimizer_of: Callable[[nn.Module], Any]) -> tuple[nn.Module, Any]:
        model = model_of()
        optimizer = optimizer_of(model)
        for seed in range(6):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = batch(model, seed)
            loss.float().backward()
            optimizer.step()
        optimizer.close()
        return model, optimizer

    runs = [run(lambda m, mode=mode: AdamW(m.parameters(), speculation=mode, threads=1)) for mode in MODES]  # type: ignore[misc]
    first, *others = (optimizer.state_digests() for _, optimizer in runs)
    assert all(other == first for other in others)
    theirs, _ = run(lambda m: TorchAdamW(m.parameters()))
    for ours, other in zip(runs[0][0].parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours, other, rtol=0, atol=3e-4)  # a wrong step is off by 1e-3


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.inner, x.requires_grad_(), use_reentrant=self.reentrant)
        return found


@pytest.mark.over_stand_in
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        train(Checkpointed(model, reentrant=reentrant), optimizer, range(5))

    stats = check_scenario(scenario, max_grad_norm=100.0)
    assert stats["buckets_speculated"] > 0


@pytest.mark.over_stand_in
@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_averaged_models(kind: str) -> None:
    averages: list[nn.Module] = []

    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        how = swa_utils.get_ema_multi_avg_fn(0.7) if kind == "ema" else None
        averaged = swa_utils.AveragedModel(model, multi_avg_fn=how)
        for round_ in range(3):
            train(model, optimizer, range(3 * round_, 3 * round_ + 3))
            averaged.update_parameters(model)
        model.load_state_dict(averaged.module.state_dict())  # go on from the average
        train(model, optimizer, range(20, 23))
        averages.append(averaged.module)

    check_scenario(scenario)
    *ours, theirs = averages
    for average in ours:
        assert_trained_alike(average, theirs)


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


@pytest.mark.over_stand_in(brings_back="always")
def test_hooks_of_parameters() -> None:
    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        def late(param: Tensor) -> None:
            assert param.grad is not None
            param.grad.clamp_(-0.01, 0.01)  # ours has packed it already

        for param in model.parameters():
            param.register_hook(lambda gradient: 2.0 * gradient)
            param.register_post_accumulate_grad_hook(late)
        train(model, optimizer, range(4))

    check_scenario(scenario, max_grad_norm=0.5)


@pytest.mark.over_stand_in(brings_back="always")
@pytest.mark.parametrize(("foreach", "also_ours"), [(False, 0.02), (True, None)])
def test_clipping_by_hand(foreach: bool, also_ours: float | None) -> None:
    """Whether the clip changes a gradient or, the norm being small, multiplies it by 1."""

    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        for seed in range(6):
            optimizer.zero_grad()
            batch(model, seed).backward()
            limit = 0.05 if seed % 2 else 1e6
            norm = nn.utils.clip_grad_norm_(model.parameters(), limit, foreach=foreach)
            assert norm > 0.05
            optimizer.step()

    check_scenario(scenario, max_grad_norm=also_ours)


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
