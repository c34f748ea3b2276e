"""GradScaler: gradients unscaled by it or by hand, infinities, fp16 parameters."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from superoffload import AdamW
from tests.support.adamw_training import Optimizer, batch, check_scenario, grads_of, model_of, nothing_shows


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
