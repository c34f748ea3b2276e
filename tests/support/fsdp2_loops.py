"""What people do around an optimizer: training loops for a sharded model, with ours or with torch's AdamW."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from superoffload.host.tensors import local_of
from tests.support.rank_processes import Net, data_rank, tokens_of
from tests.support.schedulers import SCHEDULERS

Scenario = Callable[[Net, Any], None]
STEPS = 4


def backward(model: Net, seed: int, scale: float = 1.0) -> Tensor:
    loss = model.loss(tokens_of(seed, data_rank()))
    (loss * scale).backward()
    return loss.detach()


def train(model: Net, optimizer: Any, seeds: range = range(STEPS)) -> None:
    for seed in seeds:
        optimizer.zero_grad()
        backward(model, seed)
        optimizer.step()


def checkpointed(model: Net, optimizer: Any) -> None:
    train(model, optimizer)


def tied(model: Net, optimizer: Any) -> None:
    train(model, optimizer)


def schedulers(model: Net, optimizer: Any) -> None:
    """One after the other; the learning rate changes between backward and step()."""
    for seed, (name, make) in enumerate(SCHEDULERS.items()):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3
            group["betas"] = (0.9, 0.999)
            for key in ("initial_lr", "max_lr", "min_lr", "swa_lr", "max_momentum", "base_momentum"):
                group.pop(key, None)
        scheduler = make(optimizer)
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
    for seed in range(STEPS):
        optimizer.zero_grad()
        backward(model, seed, 1024.0)
        for param in model.parameters():
            if param.grad is not None:
                param.grad.div_(1024.0)
        optimizer.step()


def scaler(model: Net, optimizer: Any) -> None:
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for seed in range(STEPS):
        optimizer.zero_grad()
        loss = model.loss(tokens_of(seed, data_rank()))
        grad_scaler.scale(loss).backward()
        grad_scaler.step(optimizer)
        grad_scaler.update()


def autocast(model: Net, optimizer: Any) -> None:
    for seed in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model.loss(tokens_of(seed, data_rank()))
        loss.backward()
        optimizer.step()


def accumulation(model: Net, optimizer: Any) -> None:
    """Reduced at each micro-batch, and reduced at the last one only."""
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(2):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(step % 2 == 0 or micro == 1)
            backward(model, 10 * step + micro)
        optimizer.step()


def accumulate(model: Net, optimizer: Any) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        with optimizer.accumulate():
            backward(model, 10 * step)
        backward(model, 10 * step + 1)
        optimizer.step()


def clip_norm(model: Net, optimizer: Any) -> None:
    for seed in range(STEPS):
        optimizer.zero_grad()
        backward(model, seed)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05 if seed % 2 else 1e6)
        optimizer.step()


def clip_value(model: Net, optimizer: Any) -> None:
    for seed in range(STEPS):
        optimizer.zero_grad()
        backward(model, seed)
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()


def edited(model: Net, optimizer: Any) -> None:
    """In place through the DTensor, through its local part, replaced, removed."""
    for seed in range(STEPS):
        optimizer.zero_grad()
        backward(model, seed)
        params = [p for p in model.parameters() if p.grad is not None]
        grads: list[Any] = [p.grad for p in params]
        grads[0].mul_(3.0)
        local_of(grads[1]).clamp_(-0.01, 0.01)
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
    for seed in range(STEPS):

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
    assert calls == ["post"] * STEPS


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
