"""Optimizer state in ``torch.optim.AdamW``'s layout: written, and read with every check before anything changes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from superoffload.arguments import as_float, check_group
from superoffload.errors import ArgumentError

StateDict: TypeAlias = dict[str, Any]
PartOf: TypeAlias = Callable[[Tensor, Tensor], Tensor]

_HYPER = ("lr", "betas", "eps", "weight_decay")
_FOREIGN = ("amsgrad", "maximize")  # of torch.optim.AdamW; not ours, so they must be off


@dataclass(frozen=True)
class ParamState:
    """One parameter's state as read, flat float32; ``master`` None where the checkpoint has none."""

    step: int
    exp_avg: Tensor
    exp_avg_sq: Tensor
    master: Tensor | None


@dataclass(frozen=True)
class ReadState:
    """Group values, and one state per parameter in the optimizer's order: None where it had not been stepped."""

    groups: list[dict[str, Any]]
    states: list[ParamState | None]


def write_state(state_dict: StateDict, *, l2: bool = False) -> StateDict:
    """A copy that later steps do not change, with what ``torch.optim.AdamW`` needs to load it."""
    states = {
        position: {name: value.clone() if isinstance(value, Tensor) else value for name, value in values.items()}
        for position, values in state_dict["state"].items()
    }
    groups = []
    for group in state_dict["param_groups"]:
        extra = {"amsgrad": False, "maximize": False, "foreach": None, "capturable": False}
        groups.append({**extra, "differentiable": False, "fused": None, "decoupled_weight_decay": not l2, **group})
    return {"state": states, "param_groups": groups}


def _whole(param: Tensor, value: Tensor) -> Tensor:
    return value.reshape(-1)


def _given(state_dict: Any) -> str:
    if isinstance(state_dict, Mapping):
        return f"a dict with {', '.join(map(repr, list(state_dict)[:3])) or 'nothing'}"
    if isinstance(state_dict, (str, os.PathLike)):
        return f"{os.fspath(state_dict)!r}, which torch.load reads"
    return f"a {type(state_dict).__name__}"


def read_state(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    *,
    l2: bool = False,
    part_of: PartOf = _whole,
) -> ReadState:
    """Checks ``state_dict`` against the optimizer's groups; raises ArgumentError and changes nothing if it misfits.

    ``l2``: the optimizer is Adam with an L2 penalty instead of AdamW. ``part_of(param, value)``: the elements of a
    tensor of the parameter's shape that this process keeps, flat.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        raise ArgumentError(
            f"state_dict: {_given(state_dict)}, expected a dict with 'state' and 'param_groups', as state_dict() of an "
            "optimizer returns"
        )
    theirs = state_dict["param_groups"]
    if not isinstance(theirs, list) or not isinstance(state_dict["state"], Mapping):
        raise ArgumentError("state_dict: expected a list under 'param_groups' and a dict under 'state'")
    if len(theirs) != len(groups):
        raise ArgumentError(f"state_dict: {len(theirs)} param groups, the optimizer has {len(groups)}")
    states: list[ParamState | None] = []
    values: list[dict[str, Any]] = []
    for g, (group, mine) in enumerate(zip(theirs, groups, strict=True)):
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), (list, tuple)):
            raise ArgumentError(f"state_dict: group {g} is no dict with a list of 'params'")
        if len(group["params"]) != len(mine["params"]):
            raise ArgumentError(
                f"state_dict: {len(group['params'])} parameters in group {g}, the optimizer has {len(mine['params'])}; "
                "is it of another model?"
            )
        values.append(_read_group(g, group, l2))
        for key, param in zip(group["params"], mine["params"], strict=True):
            where = f"state_dict: parameter {len(states)} (group {g})"
            state = state_dict["state"].get(key)
            states.append(None if state is None else _read_param(where, state, param, part_of))
    return ReadState(values, states)


def _read_group(index: int, group: Mapping[str, Any], l2: bool) -> dict[str, Any]:
    missing = [name for name in _HYPER if name not in group]
    if missing:
        raise ArgumentError(f"state_dict: group {index} lacks {', '.join(missing)}; is it from an Adam optimizer?")
    for name in _FOREIGN:
        if group.get(name):
            raise ArgumentError(f"state_dict: group {index} has {name}=True, which superoffload does not do")
    kinds = {True: "Adam with an L2 penalty", False: "AdamW"}
    theirs = not group.get("decoupled_weight_decay", not l2)
    if theirs is not l2 and float(group["weight_decay"]) != 0.0:
        raise ArgumentError(f"state_dict: group {index} is from {kinds[theirs]}, expected {kinds[l2]}")
    check_group(group)
    return {name: deepcopy(value) for name, value in group.items() if name != "params"}


def _read_param(where: str, state: Mapping[str, Any], param: Tensor, part_of: PartOf) -> ParamState:
    if not isinstance(state, Mapping):
        raise ArgumentError(f"{where}: state is {type(state).__name__}, expected a dict")
    tensors: dict[str, Tensor] = {}
    for name in ("exp_avg", "exp_avg_sq", "master"):
        value = state.get(name)
        if value is None and name == "master":
            continue
        tensors[name] = _read_tensor(where, name, value, param, part_of)
    step = as_float(state.get("step"))
    if not math.isfinite(step) or step < 0 or step != int(step):
        raise ArgumentError(f"{where}: step is {state.get('step')!r}, expected a whole number of at least 0")
    if bool((tensors["exp_avg_sq"] < 0).any()):
        raise ArgumentError(f"{where}: exp_avg_sq has values below 0; the checkpoint is damaged")
    return ParamState(int(step), tensors["exp_avg"], tensors["exp_avg_sq"], tensors.get("master"))


def _read_tensor(where: str, name: str, value: Any, param: Tensor, part_of: PartOf) -> Tensor:
    """As float32 on the CPU, flat."""
    dense = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta
    if not dense or value.shape != param.shape or not value.is_floating_point():
        found = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ArgumentError(
            f"{where}: {name} is {found}, expected dense floating point {tuple(param.shape)}; is it of another model?"
        )
    flat = part_of(param, value.detach()).to("cpu", torch.float32)
    if not bool(torch.isfinite(flat).all()):
        raise ArgumentError(f"{where}: {name} contains NaN or infinite values; the checkpoint is damaged")
    return flat
