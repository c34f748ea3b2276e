"""What people do around an optimizer (docs/limits.md), by ours in every mode and by torch.optim.AdamW."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler, swa_utils
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

from superoffload import AdamW
from superoffload.engine.schedule import MODES
from superoffload.host.signals import Uninterrupted
from tests.support.adamw_training import (
    Optimizer,
    Scenario,
    TorchAdamW,
    assert_trained_alike,
    batch,
    check_scenario,
    grads_of,
    model_of,
    nothing_shows,
    run_ours,
    train,
    weights,
)
from tests.support.checkout import ROOT
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
            with stepping(model, optimizer, seed, steps=seed >= 3):
                if seed < 3:
                    optimizer.step()
                scheduler.step(*((1.0,) if name == "ReduceLROnPlateau" else ()))

    check_scenario(scenario)
    public = {name for name in lr_scheduler.__all__ if isinstance(getattr(lr_scheduler, name), type)}
    assert public - {"LRScheduler", "_LRScheduler"} <= set(SCHEDULERS)


@contextmanager
def stepping(model: nn.Module, optimizer: Optimizer, seed: int, *, steps: bool = True) -> Iterator[list[Tensor]]:
    """A step; its gradients for what is done between backward and step()."""
    optimizer.zero_grad()
    batch(model, seed).backward()
    yield grads_of(model)
    if steps:
        optimizer.step()


# ---- between backward and step() -------------------------------------------------------------------------------------


def clip_by_hand(model: nn.Module, optimizer: Optimizer) -> None:
    for seed in range(6):  # in some steps the norm is small, and gradients are multiplied by 1
        with stepping(model, optimizer, seed):
            nn.utils.clip_grad_norm_(model.parameters(), 0.05 if seed % 2 else 1e6, foreach=seed < 3)


def edit(model: Any, optimizer: Optimizer) -> None:
    for seed in range(6):
        with stepping(model, optimizer, seed) as grads:
            if seed == 1:
                nn.utils.clip_grad_value_(model.parameters(), 0.01)
            if seed == 2:
                grads[2].view(-1)[3].add_(1.0)
            if seed == 3:
                model[0].weight.grad = torch.arange(48 * 16.0).view(16, 48).t()
            if seed == 4:
                model[0].weight.grad = None
            if seed == 5:
                grads[0].fill_(math.inf).fill_(0.25)


def hooks_of_the_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    calls: list[str] = []

    def halve(*_: Any) -> None:
        for grad in grads_of(model):
            grad.mul_(0.5)

    optimizer.register_step_pre_hook(halve)
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    everywhere = register_optimizer_step_pre_hook(lambda *_: calls.append("global"))
    try:
        train(model, optimizer, range(4))
    finally:
        everywhere.remove()
    assert calls == ["global", "post"] * 4


def hooks_of_parameters(model: nn.Module, optimizer: Optimizer) -> None:
    def late(param: Any) -> None:
        param.grad.clamp_(-0.01, 0.01)  # ours has packed it already

    for param in model.parameters():
        param.register_hook(lambda gradient: 2.0 * gradient)
        param.register_post_accumulate_grad_hook(late)
    train(model, optimizer, range(4))


# ---- before backward, and between steps ------------------------------------------------------------------------------


def accumulate(model: nn.Module, optimizer: Optimizer) -> None:
    for step, passes in enumerate([1, 2, 2, 1, 3, 2, 1]):
        optimizer.zero_grad()
        for micro in range(passes):
            batch(model, 10 * step + micro).backward()
        optimizer.step()


def activation_checkpointing(model: nn.Module, optimizer: Optimizer) -> None:
    for seed in range(5):
        optimizer.zero_grad()
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed), requires_grad=True)
        checkpoint(model, x, use_reentrant=bool(seed % 2)).square().mean().backward()
        optimizer.step()


def averages(model: nn.Module, optimizer: Optimizer) -> None:
    """Of the weights, which training goes on from."""
    for how in (swa_utils.get_ema_multi_avg_fn(0.7), None):
        averaged = swa_utils.AveragedModel(model, multi_avg_fn=how)
        for seed in range(3):
            train(model, optimizer, range(seed, seed + 2))
            averaged.update_parameters(model)
        model.load_state_dict(averaged.module.state_dict())


BROUGHT_BACK = "always"
CASES: list[tuple[Scenario, dict[str, Any], str]] = [
    (clip_by_hand, {"max_grad_norm": 0.02}, BROUGHT_BACK),
    (edit, {"bucket_numel": 1024}, BROUGHT_BACK),
    (hooks_of_the_optimizer, {"max_grad_norm": 0.5}, BROUGHT_BACK),
    (hooks_of_parameters, {"max_grad_norm": 0.5}, BROUGHT_BACK),
    (accumulate, {"bucket_numel": 1024}, BROUGHT_BACK),
    (activation_checkpointing, {"max_grad_norm": 100.0}, ""),
    (averages, {"bucket_numel": 1024}, ""),
]


@pytest.mark.parametrize(
    ("scenario", "options"),
    [
        pytest.param(scenario, options, id=scenario.__name__, marks=pytest.mark.over_stand_in(brings_back=brings_back))
        for scenario, options, brings_back in CASES
    ],
)
def test_as_with_torch(scenario: Scenario, options: dict[str, Any]) -> None:
    stats = check_scenario(scenario, **options)
    assert stats["buckets_speculated"] > 0 or options["max_grad_norm"] < 1.0, "a clip that is proven at once"
    if scenario in (edit, accumulate):
        assert stats["buckets_undone"] > 0 and stats["buckets_committed"] > 0


# ---- several backwards -----------------------------------------------------------------------------------------------


def test_nothing_shows_before_step() -> None:
    model = model_of(torch.bfloat16)
    with AdamW(model.parameters(), lr=0.1, speculation="always") as optimizer:
        for seed in range(3):
            optimizer.zero_grad()
            with nothing_shows(model):
                loss = batch(model, seed)
                loss.backward()
                assert optimizer.stats()["buckets_speculated"] == seed + 1, "the workers are at it already"
                for bucket in optimizer._engine.buckets:
                    assert bucket.running is not None
                    bucket.running.wait()
                assert torch.equal(batch(model, seed), loss), "a second forward sees the old parameters"
            versions = [p._version for p in model.parameters()]
            before = weights(model)
            optimizer.step()
            assert all(p._version > version for p, version in zip(model.parameters(), versions, strict=True))
            assert not torch.equal(weights(model), before)


@pytest.mark.over_stand_in
def test_accumulate() -> None:
    """Contexts nest, and end with an exception inside."""

    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        for step in range(4):
            optimizer.zero_grad()
            down = optimizer.stats()["bytes_down"] if isinstance(optimizer, AdamW) else 0
            with (
                pytest.raises(ZeroDivisionError),
                optimizer.accumulate(),
                mock.patch.object(Uninterrupted, "__enter__") as enter,
            ):
                batch(model, 10 * step).backward()
                with optimizer.accumulate():
                    batch(model, 10 * step + 1).backward()
                batch(model, 10 * step + 2).backward()
                assert not enter.called, "a hook has nothing to do"
                _ = 1 / 0
            assert not isinstance(optimizer, AdamW) or optimizer.stats()["bytes_down"] == down, "nothing is packed"
            batch(model, 10 * step + 9).backward()
            optimizer.step()

    stats = check_scenario(scenario)
    assert stats["buckets_undone"] == 0
    assert stats["buckets_committed"] == 4


# ---- what needs more than one scenario -------------------------------------------------------------------------------


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

    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        for seed in range(6):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = batch(model, seed)
            loss.float().backward()
            optimizer.step()

    (model, first), *others = (run_ours(scenario, mode) for mode in MODES)
    assert all(other.state_digests() == first.state_digests() for _, other in others)
    theirs = model_of()
    scenario(theirs, TorchAdamW(theirs.parameters()))
    torch.testing.assert_close(weights(model), weights(theirs), rtol=0, atol=3e-4)  # a wrong step is off by 1e-3


@pytest.mark.over_stand_in
def test_two_optimizers_share_a_model() -> None:
    models = []
    for kind in (AdamW, TorchAdamW):
        model = model_of()
        both: list[Any] = [kind(model[0].parameters(), lr=1e-2), kind(model[2:].parameters(), max_grad_norm=0.1)]
        for seed in range(5):
            batch(model, seed).backward()
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
        models.append(model)
        for optimizer in both:
            optimizer.close()
    assert_trained_alike(*models)


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


def test_the_documentation_has_verdicts_and_quotes_errors_that_exist() -> None:
    page = (ROOT / "docs/limits.md").read_text().partition("## What works")[2]
    rows = [row.strip("| ").split(" | ") for row in re.findall(r"(?m)^\| \w.*$", page)]
    assert len(rows) > 40
    for row in rows:
        assert all(cell.startswith(("works", "refused", "differs: ", "as ")) for cell in row[1:]), row
    sources = "".join(path.read_text() for name in ("superoffload", "tests") for path in (ROOT / name).rglob("*.py"))
    sources = re.sub(r"\"\s*\n\s*[rf]*\"", "", sources).replace("\\", "")  # strings over several lines
    for error in re.findall("“([^”]+)”", " ".join(page.split())):
        assert error in sources, f"docs/limits.md quotes an error that no code raises and no test expects: {error}"
