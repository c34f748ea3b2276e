"""Optimizer state in ``torch.optim.AdamW``'s layout: written, and read with every check before anything changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from superoffload.arguments import check_group
from superoffload.errors import ArgumentError

StateDict: TypeAlias = dict[str, Any]

_HYPER = ("lr", "betas", "eps", "weight_decay")
_FOREIGN = ("amsgrad", "maximize")  # of torch.optim.AdamW; not ours, so they must be off


@dataclass(frozen=True)
class ParamState:
    """One parameter's state as read; ``master`` None where the checkpoint has none."""

    step: int
    exp_avg: Tensor
    exp_avg_sq: Tensor
    master: Tensor | None


@dataclass(frozen=True)
class ReadState:
    """Group values and states by the parameter's position in the optimizer."""

    groups: list[dict[str, Any]]
    states: dict[int, ParamState]


def write_state(state_dict: StateDict) -> StateDict:
    """A copy that later steps do not change, with what ``torch.optim.AdamW`` needs to load it."""
    states = {
        position: {name: value.clone() if isinstance(value, Tensor) else value for name, value in values.items()}
        for position, values in state_dict["state"].items()
    }
    groups = []
    for group in state_dict["param_groups"]:
        extra = {"amsgrad": False, "maximize": False, "foreach": None, "capturable": False}
        groups.append({**extra, "differentiable": False, "fused": None, "decoupled_weight_decay": True, **group})
    return {"state": states, "param_groups": groups}


def read_state(
    state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], own: Mapping[Tensor, Any]
) -> ReadState:
    """Checks ``state_dict`` against the optimizer's groups; raises ArgumentError and changes nothing if it misfits."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        raise ArgumentError("state_dict: expected a dict with 'state' and 'param_groups', as state_dict() returns")
    theirs = state_dict["param_groups"]
    if len(theirs) != len(groups):
        raise ArgumentError(f"state_dict: {len(theirs)} param groups, the optimizer has {len(groups)}")
    states: dict[int, ParamState] = {}
    values: list[dict[str, Any]] = []
    position = 0
    for g, (group, mine) in enumerate(zip(theirs, groups, strict=True)):
        if len(group["params"]) != len(mine["params"]):
            raise ArgumentError(
                f"state_dict: {len(group['params'])} parameters in group {g}, the optimizer has {len(mine['params'])}"
            )
        values.append(_read_group(g, group))
        for key, param in zip(group["params"], mine["params"], strict=True):
            if key in state_dict["state"]:
                where = f"state_dict: parameter {position} (group {g})"
                states[position] = _read_param(where, state_dict["state"][key], param)
            position += 1
    return ReadState(values, states)


def _read_group(index: int, group: Mapping[str, Any]) -> dict[str, Any]:
    missing = [name for name in _HYPER if name not in group]
    if missing:
        raise ArgumentError(f"state_dict: group {index} lacks {', '.join(missing)}; is it from an Adam optimizer?")
    for name in _FOREIGN:
        if group.get(name):
            raise ArgumentError(f"state_dict: group {index} has {name}=True, which superoffload does not do")
    if not group.get("decoupled_weight_decay", True):
        raise ArgumentError(f"state_dict: group {index} is from Adam with an L2 penalty, expected AdamW")
    check_group(group)
    return {name: value for name, value in group.items() if name != "params"}


def _read_param(where: str, state: Mapping[str, Any], param: Tensor) -> ParamState:
    tensors: dict[str, Tensor] = {}
    for name in ("exp_avg", "exp_avg_sq", "master"):
        value = state.get(name)
        if value is None and name == "master":
            continue
        if not isinstance(value, Tensor) or value.shape != param.shape or not value.is_floating_point():
            found = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ArgumentError(f"{where}: {name} is {found}, expected floating point {tuple(param.shape)}")
        tensors[name] = value
    step = state.get("step")
    number = float(step.item() if isinstance(step, Tensor) else step) if step is not None else -1.0
    if number < 0 or number != int(number):
        raise ArgumentError(f"{where}: step is {step!r}, expected a whole number of at least 0")
    if not all(bool(torch.isfinite(value).all()) for value in tensors.values()):
        raise ArgumentError(f"{where}: contains NaN or infinite values; the checkpoint is damaged")
    return ParamState(int(number), tensors["exp_avg"], tensors["exp_avg_sq"], tensors.get("master"))
