"""Parameters and state on a device between steps: written to, moved, loaded; the times of their copies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from superoffload import AdamW
from tests.support.adamw_training import batch, train
from tests.support.fake_cuda import Fake
from tests.support.fake_cuda_training import LATE, run, training


def test_the_timeline_has_the_times_of_copies(fake: Fake, tmp_path: Path) -> None:
    with training(fake, trace=tmp_path / "trace.json") as (model, optimizer):
        fake.delays(1, 3000)
        train(model, optimizer, range(2, 4))
    events = [event for event in json.loads((tmp_path / "trace.json").read_text()) if event["ph"] == "X"]
    assert {"pack and down", "up and deliver"} <= {event["cat"] for event in events}
    late = [event["dur"] for event in events if event["cat"] == "pack and down"]
    assert max(late) > 100, "microseconds until a gradient has arrived, not until it was enqueued"


# ---- groups, state and parameters that are written -------------------------------------------------------------------


def regrouped(model: nn.Module, optimizer: AdamW) -> None:
    """Before a step, with its gradients packed, and between two."""
    optimizer.zero_grad()
    batch(model, 2).backward()
    first = optimizer.param_groups[0]
    optimizer.param_groups.append({**first, "params": [first["params"].pop(0)], "lr": 0.05})
    optimizer.step()
    train(model, optimizer, [3])
    optimizer.param_groups.reverse()
    train(model, optimizer, [4])
    taken_out = optimizer.param_groups[1]["params"].pop()
    train(model, optimizer, [5])
    optimizer.param_groups[0]["params"].append(taken_out)
    train(model, optimizer, range(6, 8))


def edited(model: nn.Module, optimizer: AdamW) -> None:
    for seed in range(2, 6):
        optimizer.zero_grad()
        batch(model, seed).backward()
        for param in list(model.parameters())[seed % 2 :: 2]:
            optimizer.state[param]["exp_avg"] = 0.5 * optimizer.state[param]["exp_avg"]
        if seed == 4:
            optimizer.state.clear()
        optimizer.step()


@pytest.mark.parametrize("code", [regrouped, edited])
def test_the_bits_are_those_of_the_host(fake: Fake, code: Any) -> None:
    def program(model: nn.Module, optimizer: AdamW) -> None:
        train(model, optimizer, range(2))
        code(model, optimizer)

    fake.delays(1, LATE)
    assert run(program, fake=fake, placement={"gpu_fraction": 0.5}).digests == run(program).digests
    assert fake.mismatches == 0
