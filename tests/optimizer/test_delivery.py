"""``delivery="on_demand"``: the bits of eager delivery, whatever a training loop does; who reads or writes parameters
besides the module's forward; its arguments."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from superoffload import AdamW
from superoffload.errors import ArgumentError, StateError, WorkerError
from tests.support.adamw_training import check_counters, weights


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

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
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


def odd() -> Odd:
    torch.manual_seed(0)
    return Odd()


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


def plain_step(model: Any, optimizer: AdamW, seed: int) -> None:
    optimizer.zero_grad()
    loss_of(model, seed).backward()
    optimizer.step()


def pending(optimizer: AdamW) -> set[str]:
    return {shard.name for shard in optimizer._engine.last_step.landing_shards().values()}


@contextmanager
def in_flight(**options: Any) -> Iterator[tuple[Odd, AdamW]]:
    """After a step of which nothing is delivered yet."""
    model = odd()
    with made(model, "on_demand", **options) as optimizer:
        for seed in range(2):
            plain_step(model, optimizer, seed)
        assert pending(optimizer)
        yield model, optimizer


@pytest.mark.over_stand_in(brings_back="sometimes")
def test_a_loop_has_the_bits_of_eager_delivery() -> None:
    """With a layer that half of the steps use, activation checkpointing, evaluation, weights and state loaded back."""

    def run(delivery: str) -> tuple[list[Any], list[float]]:
        model, seen = odd(), list[Any]()
        with made(model, delivery) as optimizer:
            for seed in range(6):
                model.used, model.checkpointing = seed % 2 == 0, seed > 2
                plain_step(model, optimizer, seed)
                with torch.no_grad() if seed % 2 else torch.inference_mode():
                    seen.append(loss_of(model.eval(), 100 + seed).item())
                model.train()
                plain_step(model, optimizer, 10 + seed)
                part = model.blocks[1] if seed % 2 else model
                saved = {name: value.clone() for name, value in part.state_dict().items()}
                seen.append([value.tolist() for value in saved.values()])
                plain_step(model, optimizer, 20 + seed)
                part.load_state_dict(saved)
                state = optimizer.state_dict()
                plain_step(model, optimizer, 30 + seed)
                optimizer.load_state_dict(state)
            seen.append(optimizer.state_digests())
        check_counters(optimizer)
        return seen, weights(model).tolist()

    assert run("eager") == run("on_demand")


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


READS: dict[str, Callable[[Odd], object]] = {
    "a view": lambda model: model.sometimes.weight.detach()[1:].t().contiguous(),
    "its memory": lambda model: torch.from_numpy(model.sometimes.weight.detach().numpy()).sum(),
    "a write": lambda model: model.sometimes.weight.data.zero_(),
    "a list": lambda model: torch._foreach_mul([model.sometimes.weight], 2.0),
    "a copy": copy.deepcopy,
}


def test_check_reads_finds_other_readers_and_lets_known_ones_pass() -> None:
    with in_flight() as (model, optimizer), optimizer.check_reads():
        for name, read in READS.items():
            with pytest.raises(StateError, match=r"(sometimes|embedding)\.weight.*synchronize\(\)"):
                read(model)
            assert pending(optimizer), name
        torch.zeros_like(model.sometimes.weight)
        model.sometimes.weight.view(-1)
        model.frozen.weight.sum()
        plain_step(model, optimizer, 1)
        assert pending(optimizer)
        model.state_dict()
        optimizer.state_dict()
        plain_step(model, optimizer, 4)
        optimizer.refresh_masters()
        for read in READS.values():
            read(model)


@pytest.mark.parametrize("write", ["in place", "data", "through data"])
def test_a_write_to_an_undelivered_parameter_is_kept_and_reported(write: str) -> None:
    with in_flight() as (model, optimizer):
        weight = model.sometimes.weight
        if write == "in place":
            with torch.no_grad():
                weight.fill_(0.25)
        elif write == "data":
            weight.data = torch.full_like(weight, 0.25)
        else:
            weight.data.fill_(0.25)
        with pytest.raises(StateError, match=r"sometimes\.weight: written after step\(\), before .* delivered"):
            loss_of(model, 5)
        assert torch.equal(weight, torch.full_like(weight, 0.25))
        others = [p for p in model.parameters() if p.requires_grad and p is not weight]
        loss_of(model, 5)  # reported once
        for param in others:
            assert torch.equal(param, optimizer.state[param]["master"])
        optimizer.zero_grad()
        optimizer.parts.refresh_written()
        assert torch.equal(optimizer.state[weight]["master"], weight)


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


def test_a_worker_that_fails_is_reported_where_it_lands() -> None:
    twin = odd()
    with made(twin, "eager", speculation="never") as eager:
        for seed in range(3):
            plain_step(twin, eager, seed)
        expected = eager.state_digests()
    with in_flight(speculation="never") as (model, optimizer):
        optimizer.synchronize()
        optimizer._engine.pool.inject_fault(1, "a bit fell over")
        plain_step(model, optimizer, 2)
        with pytest.raises(WorkerError, match="a bit fell over"), torch.no_grad():
            loss_of(model, 5)
        assert optimizer.state_digests() == expected, "the step was completed all the same"
        plain_step(model, optimizer, 3)
