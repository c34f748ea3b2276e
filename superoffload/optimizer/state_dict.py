"""Optimizer state is written in ``torch.optim.AdamW``'s layout, and checked completely before it is loaded."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from superoffload.distributed.ownership import Holding
from superoffload.distributed.session import plain_name
from superoffload.engine.master_halves import is_rounded
from superoffload.errors import ArgumentError
from superoffload.host.bits import all_finite
from superoffload.host.numbers import as_float
from superoffload.host.tensors import is_dtensor
from superoffload.optimizer.arguments import check_group, refuse_other_steps


class ShownSteps:
    """Has a float32 number for each place, and what it was when it was last looked at."""

    def __init__(self, places: int) -> None:
        self._tensor = torch.zeros(places, dtype=torch.float32, device="cpu")
        self._seen = np.full(places, np.nan, np.float32)

    def at(self, place: int) -> Tensor:
        return self._tensor[place]

    def look_again(self, place: int) -> None:
        """Notes that it may have been written since."""
        self._seen[place] = np.nan

    def count(self, places: Collection[int]) -> None:
        """Counts a step at these places."""
        where = list(places) if len(places) < len(self._seen) else slice(None)
        self._now()[where] += 1.0
        self._seen[where] += 1.0

    def looked_at(self, places: Iterable[int]) -> Iterator[tuple[int, float]]:
        """Yields (place, number) of these places; of none where nothing was written."""
        now = self._now()
        if not np.array_equal(now, self._seen):
            yield from ((place, float(now[place])) for place in places)

    def all_seen(self) -> None:
        self._seen[:] = self._now()

    def _now(self) -> NDArray[np.float32]:
        """Shows the tensor's memory, which a program may move: ``share_memory_()`` of a number does."""
        shown: NDArray[np.float32] = self._tensor.numpy()
        return shown


StateDict: TypeAlias = dict[str, Any]
PartOf: TypeAlias = Callable[[Tensor, Tensor], Tensor]

_HYPER = ("lr", "betas", "eps", "weight_decay")

_BLOCK = 1 << 18  # elements to check, convert or copy at a time


@dataclass(frozen=True)
class Values:
    """Reads this rank's elements of a tensor of ``shape``, first to check and then to copy them.

    ``read`` yields flat blocks with their offsets, which cover every element once. A block is valid until the next.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Iterator[tuple[int, Tensor]]]

    def copy_to(self, flat: Tensor) -> None:
        for at, block in self.read():
            flat[at : at + len(block)].copy_(block)


@dataclass(frozen=True)
class ParamState:
    """Holds one parameter's checked state, as flat float32; ``master`` is None where the checkpoint has none."""

    step: int
    exp_avg: Values
    exp_avg_sq: Values
    master: Values | None


@dataclass(frozen=True)
class ReadState:
    """Holds group values, and one state per parameter in the optimizer's order: None where it was never stepped."""

    groups: list[dict[str, Any]]
    states: list[ParamState | None]


def write_state(state_dict: StateDict, *, l2: bool = False, copy: bool = True) -> StateDict:
    """Adds the keys that ``torch.optim.AdamW`` needs to load it; of a ``copy`` later steps change nothing."""

    def kept(value: Any) -> Any:
        return value.clone() if copy and isinstance(value, Tensor) else value

    states = {at: {name: kept(value) for name, value in values.items()} for at, values in state_dict["state"].items()}
    extra = {"amsgrad": False, "maximize": False, "foreach": None, "differentiable": False, "fused": None}
    extra["decoupled_weight_decay"] = not l2
    groups = [{**extra, **group, "capturable": False} for group in state_dict["param_groups"]]
    return {"state": states, "param_groups": groups}


def blocks_of(flat: Tensor) -> Iterator[tuple[int, Tensor]]:
    for at in range(0, flat.numel(), _BLOCK):
        yield at, flat[at : at + _BLOCK]


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
    part_of: PartOf,
) -> ReadState:
    """Checks ``state_dict`` against the optimizer's groups; raises ArgumentError, with nothing changed, if it misfits.

    ``l2``: the optimizer is Adam with an L2 penalty instead of AdamW. ``part_of(param, value)`` returns the elements of
    a tensor of the parameter's shape that this process keeps, flat. Nothing is copied: the result reads ``state_dict``,
    whose values may be tensors or ``Values``, again.
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
            raise ArgumentError(f"state_dict: group {g}: expected a dict with a list under 'params'")
        if len(group["params"]) != len(mine["params"]):
            raise ArgumentError(
                f"state_dict: {len(group['params'])} parameters in group {g}, the optimizer has {len(mine['params'])}; "
                "is it of another model?"
            )
        _check_order(g, group, mine)
        values.append(_read_group(g, group, l2))
        for key, param in zip(group["params"], mine["params"], strict=True):
            where = f"state_dict: parameter {len(states)} (group {g})"
            state = state_dict["state"].get(key)
            states.append(None if state is None else read_param(where, state, param, part_of))
    return ReadState(values, states)


def _check_order(index: int, saved: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Raises if both groups name the same parameters in another order, since a state dict goes by position."""
    theirs, own = ([str(name) for name in group.get("param_names") or ()] for group in (saved, mine))
    if theirs == own or sorted(theirs) != sorted(own):
        return
    at = next(i for i, (one, other) in enumerate(zip(theirs, own, strict=True)) if one != other)
    raise ArgumentError(
        f"state_dict: parameter {at} of group {index} is {theirs[at]!r}, the optimizer has {own[at]!r} there, and "
        "state goes by position; give the optimizer its parameters in the order of the checkpoint, or save and load "
        "with superoffload.checkpoints, which goes by name"
    )


def check_saved_group(index: int, group: Mapping[str, Any]) -> None:
    """Checks that a group has all hyper-parameters, with valid values."""
    missing = [name for name in _HYPER if name not in group]
    if missing:
        raise ArgumentError(f"state_dict: group {index} lacks {', '.join(missing)}; is it from an Adam optimizer?")
    check_group(group)


def _read_group(index: int, group: Mapping[str, Any], l2: bool) -> dict[str, Any]:
    check_saved_group(index, group)
    refuse_other_steps(f"state_dict: group {index}", group, l2=l2)
    return {name: deepcopy(value) for name, value in group.items() if name != "params"}


def part_of(param: Tensor, holding: Holding, value: Tensor) -> Tensor:
    """Returns this rank's elements of a tensor of the parameter's full shape, or of a DTensor like it, flat."""
    if not is_dtensor(value):
        return holding.part_of_whole(value)
    if not is_dtensor(param) or value.placements != param.placements or value.device_mesh != param.device_mesh:
        raise ArgumentError(
            f"state_dict: a DTensor with placements {value.placements} over {value.device_mesh}, expected those of "
            "the parameter; pass full tensors, or load it with torch.distributed.checkpoint"
        )
    return holding.part(value)


def read_param(where: str, state: Any, param: Tensor, part_of: PartOf) -> ParamState:
    """Checks the state of one parameter; raises ArgumentError, which begins with ``where``, if it misfits."""
    if not isinstance(state, Mapping):
        raise ArgumentError(f"{where}: state is {type(state).__name__}, expected a dict")
    step = as_float(state.get("step"))
    if not is_whole_number(step):
        raise ArgumentError(f"{where}: step is {state.get('step')!r}, expected a whole number of at least 0")
    found: dict[str, Values] = {}
    for name in ("exp_avg", "exp_avg_sq", "master"):
        value = state.get(name)
        if value is None and name == "master":
            continue
        found[name] = _read_values(where, name, value, param, part_of)
        _check_values(where, name, found[name])
    return ParamState(int(step), found["exp_avg"], found["exp_avg_sq"], found.get("master"))


def is_whole_number(step: float) -> bool:
    return math.isfinite(step) and step >= 0 and step == int(step)


def _read_values(where: str, name: str, value: Any, param: Tensor, part_of: PartOf) -> Values:
    if value is None:
        raise ArgumentError(f"{where}: {name} is missing")
    dense = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta
    if not (dense or isinstance(value, Values)) or value.shape != param.shape or not value.dtype.is_floating_point:
        known = isinstance(value, (Tensor, Values))
        found = f"{value.dtype} {tuple(value.shape)}" if known else type(value).__name__
        raise ArgumentError(
            f"{where}: {name} is {found}, expected dense floating point {tuple(param.shape)}; is it of another model?"
        )

    def read() -> Iterator[tuple[int, Tensor]]:
        blocks = value.read() if isinstance(value, Values) else blocks_of(part_of(param, value.detach()))
        for at, block in blocks:
            yield at, block.to("cpu", torch.float32)

    return Values(tuple(value.shape), value.dtype, read)


def _check_values(where: str, name: str, values: Values) -> None:
    for _, block in values.read():
        if not all_finite(block):
            raise ArgumentError(f"{where}: {name} contains NaN or infinite values; the checkpoint is damaged")
        if name == "exp_avg_sq" and bool((block < 0).any()):
            raise ArgumentError(f"{where}: exp_avg_sq has values below 0; the checkpoint is damaged")


def read_masters(
    masters: Any, params: Sequence[tuple[str, Tensor]], part_of: Callable[[Tensor, Tensor], Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Returns (parameter, this rank's elements as flat float32); raises ArgumentError where a value does not fit.

    A mapping may have more names than there are parameters, as a state_dict has. ``part_of``: see ``read_state``.
    """
    values = _in_order(masters, [name for name, _ in params])
    return [
        (param, _read_master(name, param, value, part_of)) for (name, param), value in zip(params, values, strict=True)
    ]


def _in_order(masters: Any, names: Sequence[str]) -> list[Any]:
    if isinstance(masters, Mapping):
        by_name = {plain_name(str(name)): value for name, value in masters.items()}
        for name in names:
            if plain_name(name) not in by_name:
                raise ArgumentError(
                    f"masters: no value for {name!r}; give one for every parameter of the optimizer. Names are those "
                    "of the model given to AdamW(model=...), or of named parameters"
                )
        return [by_name[plain_name(name)] for name in names]
    if isinstance(masters, Tensor) or not isinstance(masters, Sequence):
        raise ArgumentError(f"masters: {type(masters).__name__}, expected a mapping of names to tensors, or a list")
    if len(masters) != len(names):
        raise ArgumentError(f"masters: {len(masters)} tensors, expected {len(names)}, one per parameter that trains")
    return list(masters)


def _read_master(name: str, param: Tensor, value: Any, part_of: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    if not isinstance(value, Tensor) or value.shape != param.shape or not value.is_floating_point():
        found = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ArgumentError(f"masters: {name}: {found}, expected a tensor of shape {tuple(param.shape)}")
    flat = part_of(param, value.detach()).to("cpu", torch.float32)
    if not all_finite(flat):
        raise ArgumentError(f"masters: {name}: NaN or infinite values, expected finite ones; give undamaged weights")
    published = part_of(param, param.detach()).to("cpu")
    different = int((~is_rounded(published, flat) & (flat.to(param.dtype) != published)).sum())
    if different:
        raise ArgumentError(
            f"masters: {name}: the parameter is not their rounding in {different} of {flat.numel()} elements; convert "
            f"the model with model.to({param.dtype}) from exactly these values, and give them before it changes"
        )
    return flat
