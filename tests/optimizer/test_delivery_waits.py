"""``delivery="on_demand"``: who waits for what, also where modules are compiled; what the timeline shows of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from superoffload.timeline import UP, read_trace
from tests.support.adamw_training import weights
from tests.support.delivery_loops import Odd, in_flight, loss_of, made, odd, pending, plain_step


def test_step_returns_before_anything_is_delivered_and_each_module_waits_for_its_own() -> None:
    torch.manual_seed(0)
    model = Odd(32)  # weights of a bucket and more; what is smaller shares one
    with made(model, "on_demand", bucket_numel=1024) as optimizer:
        for seed in range(2):
            plain_step(model, optimizer, seed)
        trained = {name for name, param in model.named_parameters() if param.requires_grad}
        assert pending(optimizer) == trained
        before, up = weights(model), optimizer.stats()["bytes_up"]
        large = {name for name in trained if name.endswith("proj_weight") or name == "sometimes.weight"}
        seen: dict[str, set[str]] = {}
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name: seen.update({name: trained - pending(optimizer)}))
        with torch.no_grad():
            loss_of(model, 9)
        assert seen[""] == set(), "the model itself owns nothing"
        assert "embedding.weight" in seen["embedding"], "and the head has the same one"
        assert {"blocks.0.gates.0", "blocks.0.gates.1"} <= seen["blocks.0"], "a list of parameters has no forward"
        assert not seen["blocks.0"] & large
        for i in range(3):
            assert f"blocks.{i}.attention.out_proj.weight" in seen[f"blocks.{i}.attention"], "read by its parent"
            landed = {f"blocks.{j}.attention.in_proj_weight" for j in range(i + 1)}
            assert seen[f"blocks.{i}.attention"] & large == landed
        assert "sometimes.weight" in seen["sometimes"]
        assert not pending(optimizer)
        assert optimizer.stats()["bytes_up"] - up == 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert not torch.equal(weights(model), before)


def test_waiting_in_a_forward_is_exposed_time() -> None:
    with in_flight() as (model, optimizer):
        before = optimizer.stats()["optimizer_seconds_exposed"]
        with torch.no_grad():
            loss_of(model, 5)
        assert optimizer.stats()["optimizer_seconds_exposed"] > before


def test_waits_and_late_work_are_in_the_timeline(tmp_path: Path) -> None:
    """What a step left to be delivered later belongs to that step, with the fate that its buckets had in it."""
    path = tmp_path / "trace.json"
    model = odd()
    with made(model, "on_demand", trace=path, speculation="never") as optimizer:
        for seed in range(4):
            plain_step(model, optimizer, seed)
        buckets = len(optimizer._engine.buckets)
    events = [event for event in read_trace(path) if event["ph"] == "X"]
    for step in range(2, 5):  # the first one delivers at once
        mine = [event for event in events if event["args"]["step"] == step]
        delivered = [event for event in mine if " deliver: " in event["name"]]
        assert sorted(event["args"]["bucket"] for event in delivered) == list(range(buckets))
        assert {event["args"]["fate"] for event in delivered} == {"stepped"}
        stepped = [event for event in mine if " step: " in event["name"]]
        assert sorted(event["args"]["bucket"] for event in stepped) == list(range(buckets))
        waits = [event for event in mine if event["name"].startswith("wait for")]
        assert waits and {event["cat"] for event in waits} == {UP}
        for event in delivered:
            assert any(wait["ts"] <= event["ts"] and end(event) <= end(wait) for wait in waits)


def end(event: dict[str, Any]) -> float:
    return float(event["ts"] + event["dur"]) - 0.01  # rounded to nanoseconds
