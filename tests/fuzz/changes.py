"""Operations by which users change parameters, gradients and settings."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from superoffload.errors import ArgumentError
from tests.fuzz.model import values
from tests.fuzz.program import Op
from tests.fuzz.world import World


def hyper(world: World, op: Op) -> None:
    groups = world.optimizer.param_groups
    value = tuple(op["value"]) if isinstance(op["value"], list) else op["value"]
    groups[op["group"] % len(groups)][op["name"]] = value


def max_grad_norm(world: World, op: Op) -> None:
    world.optimizer.max_grad_norm = op["value"]


@torch.no_grad()
def edit(world: World, op: Op) -> None:
    """Of gradients."""
    how = op["how"]
    world.count(f"edit, {how}")
    if how == "clip":
        nn.utils.clip_grad_norm_(world.grouped(), 0.5)
        return
    for param in world.params(op):
        if how == "none":
            param.grad = None
        elif param.grad is not None:
            _edit(param, param.grad, how)


def _edit(param: nn.Parameter, grad: Tensor, how: str) -> None:
    if how == "replace":
        param.grad = 2.0 * grad
    elif how == "multiply":
        grad.mul_(0.5)
    elif how == "add":
        grad.add_(0.25)
    elif how == "zero":
        grad.zero_()
    elif how == "nan":
        grad[0] = torch.nan
    else:
        nn.utils.clip_grad_value_([param], 0.5)


def freeze(world: World, op: Op) -> None:
    world.wait_for_savings()
    for param in world.params(op):
        param.requires_grad_(not op["frozen"])


def add_group(world: World, op: Op) -> None:
    if world.later:
        world.wait_for_savings()
        world.optimizer.add_param_group({"params": world.members(world.later.pop(0)), "lr": op["lr"]})
        world.count("add_group, added")


def write(world: World, op: Op) -> None:
    _before_writing(world, world.params(op))
    world.count(f"write, {op['how']}")
    with torch.no_grad():
        for param in world.params(op):
            _write(param, op)


def write_data(world: World, op: Op) -> None:
    _before_writing(world, world.params(op))
    for param in world.params(op):
        if op["how"] == "copy":
            param.data = (0.1 * values(op["seed"], param.numel())).to(param.dtype)
        else:
            _write(param.data, op)


def _write(param: Tensor, op: Op) -> None:
    how = op["how"]
    if how == "multiply":
        param.mul_(0.5)
    elif how == "copy":
        param.copy_(0.1 * values(op["seed"], param.numel()))
    elif how == "clamp":
        param.clamp_(-0.05, 0.05)
    elif how == "one":
        param[op["seed"] % param.numel()] = 0.25
    else:
        param.zero_().neg_()


@torch.no_grad()
def edit_state(world: World, op: Op) -> None:
    """Of moments and numbers of steps, and of the mapping that has them."""
    how, state = op["how"], world.optimizer.state
    params: list[Tensor] = [param for param in world.params(op) if state.get(param)]
    if not params:
        return
    if how == "keep":  # tensors, to write to them later
        world.kept_state = [(param, state[param]["exp_avg"]) for param in params if world.shows_moments()]
    elif how == "kept":
        world.wait_for_savings()  # which cannot know of writes to tensors that a program keeps
        params = [param for param, _ in world.kept_state]
        for _, kept in world.kept_state:
            kept.mul_(0.5)
    elif how == "clear":
        state.clear()
        params = world.grouped()
    else:
        for param in params:
            _edit_entry(state, param, how)
    world.count(f"edit_state, {how}")
    world.restructured |= how in ("clear", "delete", "empty", "replace", "step")
    if world.oracle is not None:
        world.oracle.edited(params)


def _edit_entry(state: dict[Tensor, Any], param: Tensor, how: str) -> None:
    if how == "multiply":
        state[param]["exp_avg"].mul_(0.5)
    elif how == "assign":
        state[param]["exp_avg"] = -2.0 * state[param]["exp_avg"]
    elif how == "step":
        state[param]["step"].fill_(1.0)
    elif how == "delete":
        del state[param]
    elif how == "empty":
        state[param] = {}
    else:
        state[param] = {
            **copy.copy(state[param]),
            "exp_avg": torch.zeros(param.shape, dtype=torch.float32, device="cpu"),
        }


def regroup(world: World, op: Op) -> None:
    """Parameters change their places, groups theirs, and some are in no group for a while."""
    groups, how = world.optimizer.param_groups, op["how"]
    world.wait_for_savings()
    world.slots.clear()  # which have other groups
    world.kept_state.clear()
    if how == "reverse":
        groups.reverse()
    elif how == "order":
        groups[-1]["params"].reverse()
    elif how == "put back":
        groups[0]["params"] += world.taken_out
        if world.oracle is not None:  # writes in between count from now on
            world.oracle.edited(world.taken_out)
        world.taken_out.clear()
    else:
        group = groups[op["layer"] % len(groups)]["params"]
        if len(world.grouped()) > 1 and group:
            moved = group.pop(op["layer"] % len(group))
            (world.taken_out if how == "take out" else groups[0]["params"]).append(moved)
    world.restructured = True
    world.count(f"regroup, {how}")


def tie(world: World, op: Op) -> None:
    """Two parameters share memory: ``step()`` refuses it, and goes on where they are apart again."""
    known = [param for param in world.grouped() if param in world.optimizer.state and param.requires_grad]
    pairs = [(a, b) for a in known for b in known if a is not b and a.shape == b.shape and a.dtype == b.dtype]
    if not pairs:
        return
    (one, other), own = pairs[0], pairs[0][0].data
    _before_writing(world, [one])
    one.data = other.data
    try:
        world.optimizer.step()
    except ArgumentError as error:
        world.note("raised", str(error))
        world.count("tie, refused")
    one.data = own


def load_weights(world: World, op: Op) -> None:
    """Into the model alone; the optimizer goes on."""
    _before_writing(world, list(world.net.parameters()))
    world.net.load_state_dict({name: 0.5 * value for name, value in world.net.state_dict().items()})


def refresh_masters(world: World, op: Op) -> None:
    world.optimizer.refresh_masters()


def _before_writing(world: World, params: Sequence[Tensor]) -> None:
    """What the documentation asks of those who write parameters."""
    if world.settings.delivery == "on_demand":
        world.optimizer.synchronize()
    if world.is_saving() and any(param not in world.optimizer.state for param in params):
        world.wait_for_savings()  # which reads parameters that do not train as they are
    world.written = True
    if world.oracle is not None:
        world.oracle.written(params)
