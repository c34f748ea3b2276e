"""``delivery="on_demand"``: the bits of eager delivery, wherever and whenever parameters are read."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from superoffload import AdamW
from superoffload.core import Core
from superoffload.errors import ArgumentError, StateError, WorkerError
from superoffload.link import HostLink
from superoffload.readers import readers_of
from superoffload.schedule import MODES
from superoffload.timeline import UP, read_trace
from tests.adamw_tools import batch, check_counters, model_of, weights
from tests.compatibility import compat

STEPS = 6


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.gates = nn.ParameterList([nn.Parameter(torch.ones(width)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        attended: Tensor = self.attention(x, x, x, need_weights=False)[0]
        summed: Tensor = x + self.gates[0] * self.norm(attended) + self.gates[1] * x
        return summed


class Odd(nn.Module):
    """Ends that are tied, a list of parameters, attention that reads its child, a layer that half of the steps use."""

    def __init__(self, width: int = 8, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.sometimes = nn.Linear(width, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.head = nn.Linear(width, 13, bias=False)
        self.head.weight = self.embedding.weight
        self.used = True
        self.checkpointing = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        if self.used:
            x = x + self.sometimes(x)
        logits: Tensor = self.head(x + self.frozen(x))
        return logits


def odd(dtype: torch.dtype = torch.float32, blocks: int = 3) -> Odd:
    torch.manual_seed(0)
    return Odd(blocks=blocks).to(dtype)


def loss_of(model: nn.Module, seed: int) -> Tensor:
    tokens = torch.randint(0, 13, (2, 6), generator=torch.Generator().manual_seed(seed))
    return nn.functional.cross_entropy(model(tokens)[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


@contextmanager
def made(model: nn.Module, delivery: str, **options: Any) -> Iterator[AdamW]:
    defaults: dict[str, Any] = {"lr": 3e-3, "threads": 2, "bucket_numel": 1024, "speculation": "always"}
    defaults["max_grad_norm"] = 1.0
    optimizer = AdamW(
        [p for p in model.parameters() if p.requires_grad], delivery=delivery, module=model, **{**defaults, **options}
    )
    with optimizer:
        yield optimizer


Loop = Callable[[Any, AdamW, list[Any]], None]


def compare(loop: Loop, make: Callable[[], nn.Module] = odd, **options: Any) -> AdamW:
    """The same loop with both deliveries: what it has seen, and the state at its end, are the same."""
    found = []
    for delivery in ("eager", "on_demand"):
        model, seen = make(), list[Any]()
        with made(model, delivery, **options) as optimizer:
            loop(model, optimizer, seen)
            found.append((seen, optimizer.state_digests(), weights(model)))
        check_counters(optimizer)
    (seen, digests, values), (their_seen, their_digests, their_values) = found
    assert seen == their_seen
    assert digests == their_digests
    assert torch.equal(values, their_values)
    return optimizer


def plain(model: Any, optimizer: AdamW, seen: list[Any]) -> None:
    for seed in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, seed)
        loss.backward()
        optimizer.step()
        seen.append(loss.item())


# ---- the same bits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_mode(mode: str, dtype: torch.dtype) -> None:
    optimizer = compare(plain, lambda: odd(dtype), speculation=mode)
    stats = optimizer.stats()
    assert stats["steps"] == STEPS and stats["clipped_steps"] > 0


def evaluating(model: Any, optimizer: AdamW, seen: list[Any]) -> None:
    for seed in range(STEPS):
        plain_step(model, optimizer, seed)
        model.eval()
        with torch.no_grad() if seed % 2 else torch.inference_mode():
            seen.append(loss_of(model, 100 + seed).item())
        model.train()


def plain_step(model: Any, optimizer: AdamW, seed: int) -> None:
    optimizer.zero_grad()
    loss_of(model, seed).backward()
    optimizer.step()


def accumulating(model: Any, optimizer: AdamW, seen: list[Any]) -> None:
    for seed in range(STEPS):
        optimizer.zero_grad()
        with optimizer.accumulate():
            loss_of(model, 2 * seed).backward()
        loss_of(model, 2 * seed + 1).backward()
        optimizer.step()


def accumulating_unannounced(model: Any, optimizer: AdamW, seen: list[Any]) -> None:
    for seed in range(STEPS):
        optimizer.zero_grad()
        for micro in range(3):
            loss_of(model, 3 * seed + micro).backward()
        optimizer.step()


def partly_used(model: Any, optimizer: AdamW, seen: list[Any]) -> None:
    """What is not used in a forward lands before its next gradient, or with the next step."""
    for seed in range(STEPS):
        model.used = seed % 2 == 0
        plain_step(model, optimizer, seed)


def skipping(model: Any, optimizer: AdamW, seen: list[Any]) -> None:
    for seed in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, seed)
        (loss * (float("nan") if seed in (2, 4) else 1.0)).backward()
        optimizer.step()
        seen.append(loss.item())


def zeroing_at_once(model: Any, optimizer: AdamW, seen: list[Any]) -> None:
    for seed in range(STEPS):
        loss_of(model, seed).backward()
        optimizer.step()
        optimizer.zero_grad()


def stepping_twice(model: Any, optimizer: AdamW, seen: list[Any]) -> None:
    for seed in range(STEPS):
        plain_step(model, optimizer, seed)
        optimizer.step()


def without_step(model: Any, optimizer: AdamW, seen: list[Any]) -> None:
    for seed in range(STEPS):
        plain_step(model, optimizer, seed)
        loss_of(model, 50 + seed).backward()  # thrown away


def scaled(model: Any, optimizer: AdamW, seen: list[Any]) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for seed in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, seed)
        scaler.scale(loss * (float("inf") if seed == 3 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append(loss.item())


def recomputing(model: Any, optimizer: AdamW, seen: list[Any]) -> None:
    model.checkpointing = True
    plain(model, optimizer, seen)


def saving(model: Any, optimizer: AdamW, seen: list[Any]) -> None:
    for seed in range(STEPS):
        plain_step(model, optimizer, seed)
        part = model.blocks[1] if seed % 2 else model
        saved = {name: value.clone() for name, value in part.state_dict().items()}
        seen.append([value.tolist() for value in saved.values()])
        plain_step(model, optimizer, 50 + seed)
        part.load_state_dict(saved)
        state = optimizer.state_dict()
        plain_step(model, optimizer, 70 + seed)
        optimizer.load_state_dict(state)


def writing(model: Any, optimizer: AdamW, seen: list[Any]) -> None:
    for seed in range(STEPS):
        plain_step(model, optimizer, seed)
        optimizer.synchronize()
        with torch.no_grad():
            model.sometimes.weight.clamp_(-0.1, 0.1)


def growing(model: Any, optimizer: AdamW, seen: list[Any]) -> None:
    plain(model, optimizer, seen)
    model.frozen.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.frozen.parameters()), "lr": 1e-2})
    plain(model, optimizer, seen)


LOOPS = [
    evaluating,
    accumulating,
    accumulating_unannounced,
    partly_used,
    skipping,
    zeroing_at_once,
    stepping_twice,
    without_step,
    scaled,
    recomputing,
    saving,
    writing,
    growing,
]


@compat("delivery on demand: the bits of eager delivery", "single")
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_loops(loop: Loop) -> None:
    compare(loop)


def test_learning_rates_and_norms_that_change_after_backward() -> None:
    def loop(model: Any, optimizer: AdamW, seen: list[Any]) -> None:
        for seed in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, seed).backward()
            optimizer.param_groups[0]["lr"] = 1e-2 / (1 + seed)
            optimizer.max_grad_norm = 0.1 * (1 + seed)
            optimizer.step()
            seen.append(optimizer.grad_norm)

    compare(loop, speculation="adaptive")


# ---- who waits for what -------------------------------------------------------------------------------------------


def pending(optimizer: AdamW) -> set[str]:
    return {shard.name for shard in optimizer._core.landing_shards().values()}


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
        original = Core._wait
        waits: list[float] = []

        def slow(core: Core, bucket: Any) -> bool:
            import time

            time.sleep(0.02)
            waits.append(0.02)
            return original(core, bucket)

        with mock.patch.object(Core, "_wait", slow), torch.no_grad():
            loss_of(model, 5)
        assert waits
        assert optimizer.stats()["optimizer_seconds_exposed"] - before >= sum(waits)


def test_readers_of_a_compiled_module_wait_at_its_door() -> None:
    model = odd()
    model.blocks[0].compile(backend="aot_eager")
    inlined = {type(reader.module).__name__ for reader in readers_of(model) if reader.inlined}
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


# ---- everybody else -----------------------------------------------------------------------------------------------


@contextmanager
def in_flight(**options: Any) -> Iterator[tuple[Odd, AdamW]]:
    """After a step of which nothing is delivered yet."""
    model = odd()
    with made(model, "on_demand", **options) as optimizer:
        for seed in range(2):
            plain_step(model, optimizer, seed)
        assert pending(optimizer)
        yield model, optimizer


READS: dict[str, Callable[[Odd], object]] = {
    "sum": lambda model: model.sometimes.weight.sum(),
    "a view": lambda model: model.sometimes.weight.detach()[1:].t().contiguous(),
    "its memory": lambda model: torch.from_numpy(model.sometimes.weight.detach().numpy()).sum(),
    "functional": lambda model: nn.functional.linear(torch.ones(8), model.sometimes.weight),
    "a write": lambda model: model.sometimes.weight.data.zero_(),
    "a list": lambda model: torch._foreach_mul([model.sometimes.weight], 2.0),
    "a copy": copy.deepcopy,
}


@pytest.mark.parametrize("name", READS)
def test_check_reads_finds_other_readers(name: str) -> None:
    with in_flight() as (model, optimizer), optimizer.check_reads():
        with pytest.raises(StateError, match=r"sometimes\.weight|embedding\.weight") as error:
            READS[name](model)
        assert "synchronize()" in str(error.value)
        optimizer.synchronize()
        READS[name](model)


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


def test_an_average_of_the_model() -> None:
    def loop(model: Any, optimizer: AdamW, seen: list[Any]) -> None:
        average = torch.optim.swa_utils.AveragedModel(model)
        for seed in range(STEPS):
            plain_step(model, optimizer, seed)
            optimizer.synchronize()
            average.update_parameters(model)
        seen.append(weights(average).tolist())

    compare(loop)


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


def test_a_functional_read_in_the_same_forward_cannot_go_unnoticed_in_backward() -> None:
    with in_flight() as (model, optimizer):
        read = nn.functional.linear(torch.ones(1, 8, requires_grad=True), model.sometimes.weight).sum()
        loss = loss_of(model, 5) + read
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        optimizer.zero_grad()


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


# ---- the timeline -------------------------------------------------------------------------------------------------


def test_waits_and_late_work_are_in_the_timeline(tmp_path: Path) -> None:
    """What a step left to be delivered later belongs to that step, with the fate that its buckets had in it."""
    path = tmp_path / "trace.json"
    model = odd()
    with made(model, "on_demand", trace=path, speculation="never") as optimizer:
        for seed in range(4):
            plain_step(model, optimizer, seed)
        buckets = len(optimizer._core.buckets)
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


# ---- faults -------------------------------------------------------------------------------------------------------


def test_a_worker_that_fails_is_reported_where_it_lands() -> None:
    twin = odd()
    with made(twin, "eager", speculation="never") as eager:
        for seed in range(3):
            plain_step(twin, eager, seed)
        expected = eager.state_digests()
    with in_flight(speculation="never") as (model, optimizer):
        optimizer.synchronize()
        optimizer._core.pool.inject_fault(1, "a bit fell over")
        plain_step(model, optimizer, 2)
        with pytest.raises(WorkerError, match="a bit fell over"), torch.no_grad():
            loss_of(model, 5)
        assert optimizer.state_digests() == expected, "the step was completed all the same"
        plain_step(model, optimizer, 3)


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_while_a_forward_waits(times: int) -> None:
    """One comes out once what was waited for has arrived; a second one goes through, and everybody is told."""
    twin = odd()
    with made(twin, "eager", speculation="never") as eager:
        for seed in range(2):
            plain_step(twin, eager, seed)
        expected = eager.state_digests()
        plain_step(twin, eager, 2)
        after = eager.state_digests()
    with in_flight(speculation="never") as (model, optimizer):
        original = HostLink.deliver
        pressed = list[int]()

        def interrupted(link: HostLink, *args: Any) -> Any:
            if not pressed:
                pressed.append(1)
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)
            return original(link, *args)

        with mock.patch.object(HostLink, "deliver", interrupted), pytest.raises(KeyboardInterrupt):
            loss_of(model, 5)
        assert pending(optimizer)
        if times == 1:
            assert optimizer.state_digests() == expected
            plain_step(model, optimizer, 2)
            assert optimizer.state_digests() == after
        else:
            for use in (lambda: loss_of(model, 5), optimizer.step, optimizer.synchronize):
                with pytest.raises(StateError, match="interrupted in the middle"):
                    use()


LEAVING = """
import os, sys, time
import torch, torch._dynamo  # an optimizer loads that
from superoffload import AdamW
from superoffload.errors import StateError
torch.set_num_threads(1)

def in_flight():
    global model, optimizer
    model = torch.nn.Sequential(*(torch.nn.Linear(500, 500) for _ in range(8)))
    optimizer = AdamW(model.parameters(), speculation="never", delivery="on_demand", module=model)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 500)).sum().backward()
        optimizer.step()
    assert optimizer._core.is_landing

def forking():
    child = os.fork()
    if child == 0:
        for use, text in ((lambda: model(torch.ones(2, 500)), "call synchronize() before fork()"),
                          (optimizer.step, "do not survive fork()")):
            try:
                use()
            except StateError as error:
                assert text in str(error), error
            else:
                os._exit(1)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    model(torch.ones(2, 500))
    assert all(torch.equal(p, optimizer.state[p]["master"]) for p in model.parameters())

def quietly(error):
    sys.stderr = open(os.devnull, "w")
    raise error

for ending in (lambda: sys.exit(3), lambda: quietly(ValueError()), lambda: quietly(KeyboardInterrupt()), forking):
    child = os.fork()
    if child == 0:
        in_flight()
        ending()
        sys.exit()
    began = time.monotonic()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), time.monotonic() - began < 30, flush=True)
"""


def test_processes_with_pending_work_end() -> None:
    """By sys.exit, by an error, by Ctrl-C, at their end; a forked child is told what it lacks, its parent goes on."""
    done = subprocess.run(
        [sys.executable, "-c", LEAVING],
        capture_output=True, text=True, timeout=200, env={**os.environ, "PYTHONPATH": os.getcwd()}, check=False,
    )  # fmt: skip
    assert not done.stderr, done.stderr
    codes = done.stdout.split()
    assert codes[::2] == ["3", "1", str(-signal.SIGINT), "0"]
    assert set(codes[1::2]) == {"True"}


# ---- arguments ----------------------------------------------------------------------------------------------------


def test_arguments() -> None:
    model, other = odd(), odd()
    trained = [p for p in model.parameters() if p.requires_grad]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"delivery": "later"}, "expected 'eager' or 'on_demand'"),
        ({"delivery": "on_demand"}, "needs the module"),
        ({"module": model, "model": other}, "module and model are not the same"),
        ({"module": trained}, "module: list, expected the torch.nn.Module"),
        ({"delivery": "on_demand", "module": other}, "is no parameter of module"),
        ({"delivery": "on_demand", "module": model, "replicated": "shard"}, "replicated='shard'"),
    ]
    for options, message in wrong:
        with pytest.raises(ArgumentError, match=message):
            AdamW(trained, **options)
    assert not any(module._forward_pre_hooks for module in model.modules())
    with AdamW(model.head.parameters(), delivery="on_demand", model=model) as optimizer:
        with pytest.raises(ArgumentError, match="is no parameter of module"):
            optimizer.add_param_group({"params": list(other.blocks.parameters())})
        assert len(optimizer.param_groups) == 1


def test_a_sequential_of_the_tools() -> None:
    """Module hooks of the plainest model there is."""

    def loop(model: Any, optimizer: AdamW, seen: list[Any]) -> None:
        for seed in range(STEPS):
            optimizer.zero_grad()
            loss = batch(model, seed)
            loss.backward()
            optimizer.step()
            seen.append(loss.item())

    compare(loop, model_of)
