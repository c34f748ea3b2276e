"""Names all parts of a model and its optimizer by the parameters' names, alike for every engine and number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from superoffload.adamw import AdamW
from superoffload.checkpoints.tensor_files import StoredPart
from superoffload.cpu_adamw import CPUAdamW
from superoffload.distributed.ownership import Holding, dtensor_holding, whole_holding
from superoffload.distributed.session import RankSession, plain_name
from superoffload.errors import ArgumentError
from superoffload.host.tensors import is_dtensor

_Result = TypeVar("_Result")
_EXTRA_STATE = "_extra_state"
MODEL, MASTER, EXP_AVG, EXP_AVG_SQ = "model.", "master.", "exp_avg.", "exp_avg_sq."  # of entries in files


def piece_of(tensor: Tensor, holding: Holding) -> StoredPart:
    return StoredPart(tuple(tensor.shape), holding.box, holding.is_flat)


def holding_of(name: str, tensor: Tensor) -> Holding:
    """Returns how this rank holds a tensor without optimizer state: a DTensor's own layout, or the whole tensor."""
    return dtensor_holding(name, tensor) if is_dtensor(tensor) else whole_holding(tensor)


class Whole(NamedTuple):
    """Holds what all ranks together have: more than this rank where each has a part of the model.

    ``names`` are those of tensors, ``groups`` those of parameters, ``steps`` count each parameter's steps.
    """

    names: set[str]
    groups: list[list[str]]
    aliases: dict[str, str]
    other: dict[str, Any]
    steps: dict[str, int]


@dataclass(frozen=True)
class Named:
    """Holds the model's tensors and the optimizer's parameters on this rank by plain names.

    ``aliases`` maps further names of a tied tensor to its first name. ``other`` holds the entries of the model's
    state_dict that are not tensors, and what ``get_extra_state`` returned, tensors included; ``modules`` take it back.
    """

    tensors: dict[str, Tensor]
    aliases: dict[str, str]
    other: dict[str, Any]
    modules: dict[str, nn.Module]
    groups: list[list[str]]
    params: dict[str, Tensor]
    states: Mapping[Tensor, Any]
    session: RankSession | None

    @property
    def rank(self) -> int:
        return self.session.group.rank if self.session is not None else 0

    @property
    def ranks(self) -> list[int]:
        return self.session.group.ranks if self.session is not None else [0]

    @property
    def is_first(self) -> bool:
        return self.rank == self.ranks[0]

    @property
    def has_parts(self) -> bool:
        """Tells whether the ranks have different parts of the model."""
        return self.session is not None and self.session.has_parts

    def called(self, rank: int) -> str:
        """Returns the name of a rank in errors."""
        return self.session.group.hosts.rank(rank) if self.session is not None else f"rank {rank}"

    def told_by_all(self, what: str, mine: Any) -> list[Any]:
        """Returns what every rank passes. Collective."""
        return [mine] if self.session is None else self.session.group.exchange_objects(what, mine)

    def whole(self, what: str) -> Whole:
        """Joins the names of all ranks. Collective where ranks have parts of one model."""
        states = {name: self.states.get(param, {}) for name, param in self.params.items()}
        steps = {name: int(state["step"]) for name, state in states.items() if "step" in state}
        mine = Whole(set(self.tensors) | set(self.aliases), self.groups, self.aliases, self.other, steps)
        if not self.has_parts:
            return mine
        whole = Whole(set(), [[] for _ in self.groups], {}, {}, {})
        for theirs in self.told_by_all(f"{what}: names", mine):
            if len(theirs.groups) != len(self.groups):
                raise ArgumentError(
                    f"optimizer: {len(theirs.groups)} param groups on one rank, {len(self.groups)} on this one; parts "
                    "of one model need as many groups on every rank, which may be empty"
                )
            for group, more in zip(whole.groups, theirs.groups, strict=True):
                group.extend(name for name in more if name not in group)
            whole.names.update(theirs.names)
            whole.aliases.update(theirs.aliases)
            whole.other.update(theirs.other)
            whole.steps.update(theirs.steps)
        return whole

    def on_all_ranks(self, what: str, work: Callable[[], _Result]) -> _Result:
        """Runs ``work``, which changes nothing; if it raises on one rank, all ranks raise."""
        error = None
        try:
            result = work()
        except Exception as failed:
            error = failed
        if self.session is not None:
            self.session.agree(what, error)
        if error is not None:
            raise error
        return result


def check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, (AdamW, torch.optim.AdamW)):
        remedy = "pass a wrapper's .optimizer (Accelerate's has one)"
        if isinstance(optimizer, CPUAdamW):
            remedy = "save its state_dict() and the model's with torch.save()"
        elif any(base.__module__.startswith("deepspeed.") for base in type(optimizer).__mro__):
            remedy = "use engine.save_checkpoint()"
        raise ArgumentError(
            f"optimizer: {type(optimizer).__name__}, expected superoffload.AdamW or torch.optim.AdamW; {remedy}"
        )


def name_everything(model: nn.Module, optimizer: Optimizer | None) -> Named:
    """Names all tensors, without ``optimizer`` the model's alone; raises for a parameter that is not the model's."""
    session = optimizer.parts.ranks.session if isinstance(optimizer, AdamW) else None
    param_groups = optimizer.param_groups if optimizer is not None else []
    names = {id(param): plain_name(name) for name, param in model.named_parameters()}
    first: dict[int, str] = {}
    if isinstance(optimizer, AdamW) and session is not None and session.has_parts:
        # A parameter that another part of the model has too, under another name, goes by the name that both were given.
        known = (optimizer.parts.params.get(param) for group in param_groups for param in group["params"])
        declared = {id(one.param): one.shard.name for one in known if one is not None}
        first = {key: name for key, name in declared.items() if key in names and names[key] != name}
        names.update(first)
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    other: dict[str, Any] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        name = plain_name(key)
        if is_extra_state(name) or not isinstance(value, Tensor):
            other[name] = value
            continue
        kept = first.setdefault(id(value), name)
        tensors[kept] = value
        if kept != name:
            aliases[name] = kept
    for g, group in enumerate(param_groups):
        for i, param in enumerate(group["params"]):
            if id(param) not in names:
                raise ArgumentError(
                    f"optimizer: parameter {i} of group {g} is none of model's; give the model it was made for"
                )
    groups = [[names[id(param)] for param in group["params"]] for group in param_groups]
    params = {names[id(param)]: param for group in param_groups for param in group["params"]}
    modules = {plain_name(f"{name}.{_EXTRA_STATE}" if name else _EXTRA_STATE): m for name, m in model.named_modules()}
    states: Mapping[Tensor, Any] = optimizer.state if optimizer is not None else {}
    return Named(tensors, aliases, other, modules, groups, params, states, session)


def is_extra_state(name: str) -> bool:
    """Returns whether a module's ``get_extra_state`` made this entry of a state_dict."""
    return name.rpartition(".")[2] == _EXTRA_STATE
