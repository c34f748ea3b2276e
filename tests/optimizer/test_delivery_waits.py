"""``delivery="on_demand"``: who waits for what, also where modules are compiled; what the timeline shows of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from superoffload.engine.executor import Executor
from superoffload.optimizer.module_readers import readers_of
from superoffload.timeline import UP, read_trace
from tests.support.adamw_training import weights
from tests.support.delivery_loops import Odd, loss_of, made, odd, pending, plain_step


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
    model = odd()
    with made(model, "on_demand") as optimizer:
        for seed in range(2):
            plain_step(model, optimizer, seed)
        before = optimizer.stats()["optimizer_seconds_exposed"]
        original = Executor.wait
        waits: list[float] = []

        def slow(executor: Executor, bucket: Any) -> bool:
            import time

            time.sleep(0.02)
            waits.append(0.02)
            return original(executor, bucket)

        with mock.patch.object(Executor, "wait", slow), torch.no_grad():
            loss_of(model, 5)
        assert waits
        assert optimizer.stats()["optimizer_seconds_exposed"] - before >= sum(waits)


def test_readers_of_a_compiled_module_wait_at_its_door() -> None:
    model = odd()
    model.blocks[0].compile(backend="aot_eager")
    inlined = {type(reader.module).__name__ for reader in readers_of(model) if reader.unit is not None}
    assert inlined == {"MultiheadAttention", "NonDynamicallyQuantizableLinear", "LayerNorm"}
    (door,) = (reader for reader in readers_of(model) if reader.module is model.blocks[0])
    assert set(door.params) >= {id(param) for param in model.blocks[0].parameters()}


@pytest.mark.parametrize("how", ["model", "blocks", "blocks before", "whole blocks"])
def test_compiled(how: str) -> None:
    """As with values that are all there at once. (Where hooks part a graph, eager delivery rounds otherwise.)"""

    def run(at_once: bool) -> tuple[list[float], dict[str, str]]:
        torch._dynamo.reset()
        model = odd(blocks=1)
        run: Any = model
        if how in ("blocks before", "whole blocks"):
            for i, block in enumerate(model.blocks):
                if how == "blocks before":
                    block.compile(backend="aot_eager")
                else:
                    model.blocks[i] = torch.compile(block, backend="aot_eager", fullgraph=True)  # type: ignore
        with made(model, "on_demand") as optimizer:
            if how == "model":
                run = torch.compile(model, backend="aot_eager")
            elif how == "blocks":
                for block in model.blocks:
                    block.compile(backend="aot_eager")
            losses = []
            for seed in range(3):
                plain_step(run, optimizer, seed)
                assert seed == 0 or pending(optimizer)
                if at_once:
                    optimizer.synchronize()
                with torch.no_grad():
                    losses.append(loss_of(run, 50 + seed).item())
            return losses, optimizer.state_digests()

    assert run(False) == run(True)


@pytest.mark.parametrize("how", ["model", "blocks"])
def test_graphs_stay_whole_where_the_module_was_compiled_first(how: str) -> None:
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    model: Any = odd()
    if how == "model":
        model = torch.compile(model, backend=count)
    else:
        for block in model.blocks:
            block.compile(backend=count)
    with made(model, "on_demand") as optimizer:
        for seed in range(3):
            plain_step(model, optimizer, seed)
        assert pending(optimizer)
    assert len(graphs) == 1, "the blocks have the same one"


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
