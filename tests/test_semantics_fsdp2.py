"""What people do around an optimizer, on a model that fully_shard has sharded: as torch.optim.AdamW doing the same."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, fully_shard

from superoffload import AdamW
from superoffload.ranks.layout import local_of
from tests.adamw_tools import TorchAdamW
from tests.compatibility import Refusal, compat
from tests.rank_tools import Net, error_of, flat_mesh, net, on_ranks, optimizer_of, shard, tokens_of, wholes_of
from tests.test_semantics import SCHEDULERS

Scenario = Callable[[Net, Any], None]
_STEPS = 4


def backward(model: Net, seed: int, scale: float = 1.0) -> Tensor:
    loss = model.loss(tokens_of(seed, dist.get_rank()))
    (loss * scale).backward()
    return loss.detach()


def train(model: Net, optimizer: Any, seeds: range = range(_STEPS)) -> None:
    for seed in seeds:
        optimizer.zero_grad()
        backward(model, seed)
        optimizer.step()


def schedulers(model: Net, optimizer: Any) -> None:
    """One after the other; the learning rate changes between backward and step()."""
    for name, make in SCHEDULERS.items():
        for group in optimizer.param_groups:
            group["lr"] = 1e-3
            group["betas"] = (0.9, 0.999)
            for key in ("initial_lr", "max_lr", "min_lr", "swa_lr", "max_momentum", "base_momentum"):
                group.pop(key, None)
        scheduler = make(optimizer)
        for seed in range(2):
            optimizer.zero_grad()
            backward(model, seed)
            scheduler.step(*((1.0,) if name == "ReduceLROnPlateau" else ()))
            optimizer.step()


def add_group(model: Net, optimizer: Any) -> None:
    """The head comes later, between a backward and its step."""
    train(model, optimizer, range(2))
    optimizer.zero_grad()
    backward(model, 2)
    optimizer.add_param_group({"params": list(model.head.parameters()), "lr": 1e-2})
    optimizer.step()
    train(model, optimizer, range(3, 5))


def loss_scaling(model: Net, optimizer: Any) -> None:
    for seed in range(_STEPS):
        optimizer.zero_grad()
        backward(model, seed, 1024.0)
        for param in model.parameters():
            if param.grad is not None:
                param.grad.div_(1024.0)
        optimizer.step()


def scaler(model: Net, optimizer: Any) -> None:
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for seed in range(_STEPS):
        optimizer.zero_grad()
        loss = model.loss(tokens_of(seed, dist.get_rank()))
        grad_scaler.scale(loss).backward()
        grad_scaler.step(optimizer)
        grad_scaler.update()


def autocast(model: Net, optimizer: Any) -> None:
    for seed in range(_STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model.loss(tokens_of(seed, dist.get_rank()))
        loss.backward()
        optimizer.step()


def accumulation(model: Net, optimizer: Any) -> None:
    """Reduced at each micro-batch, and reduced at the last one only."""
    for step in range(_STEPS):
        optimizer.zero_grad()
        for micro in range(2):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(step % 2 == 0 or micro == 1)
            backward(model, 10 * step + micro)
        optimizer.step()


def accumulate(model: Net, optimizer: Any) -> None:
    for step in range(_STEPS):
        optimizer.zero_grad()
        with optimizer.accumulate():
            backward(model, 10 * step)
        backward(model, 10 * step + 1)
        optimizer.step()


def clip_norm(model: Net, optimizer: Any) -> None:
    for seed in range(_STEPS):
        optimizer.zero_grad()
        backward(model, seed)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05 if seed % 2 else 1e6)
        optimizer.step()


def clip_value(model: Net, optimizer: Any) -> None:
    for seed in range(_STEPS):
        optimizer.zero_grad()
        backward(model, seed)
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()


def edited(model: Net, optimizer: Any) -> None:
    """In place through the DTensor, through its local part, replaced, removed."""
    for seed in range(_STEPS):
        optimizer.zero_grad()
        backward(model, seed)
        params = [p for p in model.parameters() if p.grad is not None]
        grads: list[Any] = [p.grad for p in params]
        grads[0].mul_(3.0)
        grads[1].to_local().clamp_(-0.01, 0.01)
        params[2].grad = grads[2] * 0.5
        params[3].grad = None
        optimizer.step()


def zeroing(model: Net, optimizer: Any) -> None:
    """Dropped between backward and step, in both ways, and by the model."""
    for seed, zero in enumerate([lambda: optimizer.zero_grad(False), optimizer.zero_grad, model.zero_grad]):
        train(model, optimizer, range(seed, seed + 1))
        optimizer.zero_grad(set_to_none=bool(seed % 2))
        backward(model, 50)
        zero()
        backward(model, 60 + seed)
        optimizer.step()


def without_gradients(model: Net, optimizer: Any) -> None:
    optimizer.step()
    train(model, optimizer)
    optimizer.zero_grad()
    optimizer.step()
    backward(model, 20)
    for param in model.head.parameters():
        param.grad = None
    optimizer.step()


def freezing(model: Net, optimizer: Any) -> None:
    train(model, optimizer, range(2))
    model.layers[0].requires_grad_(False)
    train(model, optimizer, range(2, 4))
    model.layers[0].requires_grad_(True)
    train(model, optimizer, range(4, 6))


def writes(model: Net, optimizer: Any) -> None:
    """Clamped, loaded, initialized again: between steps, and between a backward and its step."""
    kept = {name: value.detach().clone() for name, value in model.state_dict().items()}
    train(model, optimizer, range(2))
    with torch.no_grad():
        for param in model.parameters():
            param.clamp_(-0.2, 0.2)
    train(model, optimizer, range(2, 4))
    optimizer.zero_grad()
    backward(model, 4)
    model.load_state_dict(kept)
    optimizer.step()
    with torch.no_grad():
        for param in model.head.parameters():
            local_of(param).fill_(0.01)
    train(model, optimizer, range(5, 7))


def closure(model: Net, optimizer: Any) -> None:
    for seed in range(_STEPS):

        def again(seed: int = seed) -> float:
            optimizer.zero_grad()
            return backward(model, seed).item()

        assert optimizer.step(again) > 0.0


def hooks(model: Net, optimizer: Any) -> None:
    calls: list[str] = []

    def halve(one: Any, *_: Any) -> None:
        for group in one.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.mul_(0.5)

    optimizer.register_step_pre_hook(halve)
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    train(model, optimizer)
    assert calls == ["post"] * _STEPS


def parameter_hooks(model: Net, optimizer: Any) -> None:
    def late(param: Any) -> None:
        param.grad.clamp_(-0.01, 0.01)

    for param in model.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(late)
    train(model, optimizer)


def averages(model: Net, optimizer: Any) -> None:
    averaged: dict[str, Tensor] = {}
    for seed in range(3):
        train(model, optimizer, range(2 * seed, 2 * seed + 2))
        for name, param in model.named_parameters():
            averaged.setdefault(name, param.detach().clone()).lerp_(param.detach(), 0.3)
    kept = {name: param.detach().clone() for name, param in model.named_parameters()}
    for values in (averaged, kept, averaged):  # swapped in for an evaluation, back, and in for good
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(values[name])
    train(model, optimizer, range(8, 10))


def listed_writes(model: Net, optimizer: Any) -> None:
    """Operations on lists of DTensors raise no version counter: between steps, and between a backward and its step."""
    params: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    train(model, optimizer, range(2))
    with torch.no_grad():
        torch._foreach_mul_(params, 0.5)
    train(model, optimizer, range(2, 4))
    optimizer.zero_grad()
    backward(model, 4)
    with torch.no_grad():
        torch._foreach_mul_(params, 1.5)
    optimizer.step()
    train(model, optimizer, range(5, 6))


@compat("parameters written by the user (load_state_dict, clamp, re-initialization)", "fsdp2")
def test_writes_by_operations_on_lists() -> None:
    compare(listed_writes)


@compat("every scheduler of torch.optim.lr_scheduler", "fsdp2")
@compat("lr changed between backward and step()", "fsdp2")
def test_schedulers() -> None:
    compare(schedulers)


BATTERY: list[Any] = [
    pytest.param(
        loss_scaling, marks=compat("plain loss scaling: scaled loss, gradients divided before step()", "fsdp2")
    ),
    pytest.param(accumulation, marks=compat("gradient accumulation", "fsdp2")),
    pytest.param(accumulate, marks=compat("gradient accumulation with accumulate()", "fsdp2")),
    pytest.param(clip_norm, marks=compat("clip_grad_norm_ by the user after backward", "fsdp2")),
    pytest.param(clip_value, marks=compat("clip_grad_value_ by the user after backward", "fsdp2")),
    pytest.param(edited, marks=compat("gradients edited, replaced or removed before step()", "fsdp2")),
    pytest.param(zeroing, marks=compat("zero_grad(set_to_none=True or False)", "fsdp2")),
    pytest.param(without_gradients, marks=compat("a step with some or no gradients", "fsdp2")),
    pytest.param(freezing, marks=compat("parameters frozen and unfrozen mid-run", "fsdp2")),
    pytest.param(
        writes, marks=compat("parameters written by the user (load_state_dict, clamp, re-initialization)", "fsdp2")
    ),
    pytest.param(closure, marks=compat("closure", "fsdp2")),
    pytest.param(hooks, marks=compat("optimizer hooks (register_step_pre_hook and its kin)", "fsdp2")),
    pytest.param(parameter_hooks, marks=compat("hooks of parameters that change or read gradients", "fsdp2")),
    pytest.param(averages, marks=compat("EMA and SWA, averages swapped in", "fsdp2")),
]


def run(scenario: Scenario, options: dict[str, Any]) -> dict[str, Any]:
    """In a rank: ours in two modes, and torch's, on the same sharded model."""
    found: dict[str, Any] = {}
    for mode in ("always", "never"):
        model = built(options)
        with optimizer_of_all(model, mode, options) as optimizer:
            scenario(model, optimizer)
            found[mode] = optimizer.state_digests()
        found["ours"] = wholes_of(model)
    theirs = built(options)
    params = [p for p in trained(theirs, options) if p.requires_grad]
    scenario(theirs, TorchAdamW(params, lr=1e-3, max_grad_norm=options.get("max_grad_norm")))
    found["torch"] = wholes_of(theirs)
    return found


def built(options: dict[str, Any]) -> Net:
    model = net(torch.float32, tied=bool(options.get("tied")))
    if options.get("checkpointing"):
        model.layers = nn.ModuleList(checkpoint_wrapper(layer) for layer in model.layers)
    return shard(model, flat_mesh())


def trained(model: Net, options: dict[str, Any]) -> list[nn.Parameter]:
    left_out = {id(p) for p in model.head.parameters()} if options.get("without_head") else set()
    return [p for p in model.parameters() if id(p) not in left_out]


def optimizer_of_all(model: Net, mode: str, options: dict[str, Any]) -> AdamW:
    params = [p for p in trained(model, options) if p.requires_grad]
    limit = options.get("max_grad_norm")
    return AdamW(params, lr=1e-3, max_grad_norm=limit, speculation=mode, threads=1, bucket_numel=1024, model=model)


def compare(scenario: Scenario, *, tolerance: float = 3e-6, **options: Any) -> None:
    for found in on_ranks(2, run, scenario, options):
        assert found["always"] == found["never"]
        for ours, theirs in zip(found["ours"], found["torch"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=tolerance)  # a wrong step is off by 1e-3


@pytest.mark.parametrize("scenario", BATTERY)
def test_as_torch(scenario: Scenario) -> None:
    compare(scenario)


@compat("add_param_group at any time", "fsdp2")
def test_add_param_group() -> None:
    compare(add_group, without_head=True)


@compat("autocast", "fsdp2")
def test_autocast() -> None:
    compare(autocast, tolerance=5e-4)


@compat("GradScaler", "fsdp2")
def test_grad_scaler() -> None:
    compare(scaler, tolerance=2e-5)


@compat("activation checkpointing", "fsdp2")
def test_activation_checkpointing() -> None:
    compare(train, checkpointing=True)


@compat("clip_grad_norm_ by the user after backward", "fsdp2")
def test_clipping_twice() -> None:
    """By the user, and by max_grad_norm."""
    compare(clip_norm, max_grad_norm=0.02)


@compat("tied parameters", "fsdp2")
def test_tied() -> None:
    compare(train, tied=True)


def several() -> list[bool]:
    """Two optimizers on one model, stepped in turn; as torch's two."""
    results = []
    for kind in ("always", "never", "torch"):
        model = shard(net(torch.float32), flat_mesh())
        params = [p for p in model.parameters() if p.requires_grad]
        parts = (params[::2], params[1::2])
        if kind == "torch":
            optimizers: list[Any] = [TorchAdamW(part, lr=1e-3) for part in parts]
        else:
            optimizers = [AdamW(part, lr=1e-3, speculation=kind, threads=1, model=model) for part in parts]
        for seed in range(_STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            backward(model, seed)
            for optimizer in optimizers[: 1 + seed % 2]:
                optimizer.step()
        results.append(wholes_of(model))
        for optimizer in optimizers:
            optimizer.close()
    always, never, torchs = results
    return [
        all(torch.equal(a, b) for a, b in zip(always, never, strict=True)),
        all(torch.allclose(a, b, rtol=1e-4, atol=3e-6) for a, b in zip(always, torchs, strict=True)),
    ]


@compat("several optimizers on one model", "fsdp2")
def test_several_optimizers() -> None:
    assert on_ranks(2, several) == [[True, True]] * 2


def copies() -> list[str]:
    model = shard(net(torch.float32), flat_mesh())
    with optimizer_of(model) as optimizer:
        return [error_of(lambda: copy.deepcopy(optimizer)), error_of(lambda: pickle.dumps(optimizer))]


@compat(
    "copy.deepcopy and pickle of the optimizer",
    "fsdp2",
    refused="an optimizer with worker threads cannot be copied or pickled; save its state_dict() instead",
)
def test_copies_of_the_optimizer(refusal: Refusal) -> None:
    for errors in on_ranks(2, copies):
        for error in errors:
            refusal.check(error)


class Odd(Net):
    """With a parameter of no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, 13))


def empty_parameter() -> list[str]:
    digests = []
    for mode in ("always", "never"):
        torch.manual_seed(0)
        model = shard(Odd(), flat_mesh())
        with optimizer_of(model, speculation=mode) as optimizer:
            train(model, optimizer)
            digests.append(str(optimizer.state_digests()))
    return digests


@compat("zero-size parameters", "fsdp2")
def test_zero_size_parameters() -> None:
    for always, never in on_ranks(2, empty_parameter):
        assert always == never


class Scaled(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(shape))


def scalar_parameter() -> str:
    return error_of(lambda: fully_shard(Scaled(()), mesh=flat_mesh()))


@compat("scalar parameters", "fsdp2", refused="fully_shard doesn't support scalar parameters")
def test_scalar_parameters(refusal: Refusal) -> None:
    """By torch itself."""
    for error in on_ranks(2, scalar_parameter):
        refusal.check(error)


def transposed() -> str:
    model = Scaled((3, 4))
    model.scale = nn.Parameter(torch.ones(3, 4).t())
    return error_of(lambda: fully_shard(model, mesh=flat_mesh()))


@compat("non-contiguous parameters", "fsdp2", refused="FSDP does not support non-contiguous parameters yet")
def test_non_contiguous_parameters(refusal: Refusal) -> None:
    """By torch itself."""
    for error in on_ranks(2, transposed):
        refusal.check(error)


class Mixed(Net):
    """A bfloat16 layer among float32 ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].bfloat16()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.layers[0](x.bfloat16()).float()
        logits: Tensor = self.head(x + self.layers[1](x)).clone()
        return logits


def mixed() -> list[Any]:
    found = []
    for mode in ("always", "never"):
        torch.manual_seed(0)
        model = shard(Mixed(), flat_mesh())
        with optimizer_of(model, speculation=mode) as optimizer:
            before = backward(model, 0).item()
            train(model, optimizer, range(8))
            optimizer.zero_grad()
            found.append((optimizer.state_digests(), before, backward(model, 0).item()))
    return found


@compat("mixed float32, bfloat16 and float16 parameters", "fsdp2")
def test_mixed_dtypes() -> None:
    for (always, before, after), (never, *_) in on_ranks(2, mixed):
        assert always == never and after < before


def masters() -> list[bool]:
    """Loaded as float32, converted, sharded; masters get the float32 bits."""
    whole = net(torch.float32)
    values = {name: p.detach().clone() for name, p in whole.named_parameters()}
    model = shard(whole.bfloat16(), flat_mesh())
    with optimizer_of(model) as optimizer:
        optimizer.load_masters(values)
        same = []
        for name, param in model.named_parameters():
            if param.requires_grad:
                master: Any = optimizer.state[param]["master"]
                same.append(torch.equal(master.full_tensor(), values[name]))
        bad = {**values, "head.weight": values["head.weight"] + (1.0 if dist.get_rank() else 0.0)}
        error = error_of(lambda: optimizer.load_masters(bad))
        train(model, optimizer)
        return [all(same), "head.weight" in error or "rank 1 failed" in error]


@compat("a model loaded as float32 and converted to bfloat16; masters keep the float32 bits", "fsdp2")
def test_masters_keep_the_float32_bits() -> None:
    assert on_ranks(2, masters) == [[True, True]] * 2


def compiled_step() -> list[bool]:
    digests = []
    for compiled in (True, False):
        model = shard(net(torch.float32), flat_mesh())
        with optimizer_of(model) as optimizer:
            step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
            for seed in range(2):
                optimizer.zero_grad()
                backward(model, seed)
                step()
            digests.append(optimizer.state_digests())
    return [digests[0] == digests[1]]


def test_a_compiled_step() -> None:
    assert on_ranks(2, compiled_step) == [[True]] * 2
