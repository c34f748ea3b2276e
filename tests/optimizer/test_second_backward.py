"""What several backward passes add up to, with accumulate() and without; until step() no parameter changes."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

from superoffload import AdamW
from superoffload.host.signals import Uninterrupted
from tests.support.adamw_training import Optimizer, batch, check_scenario, model_of, nothing_shows, weights


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
