"""Names all parts of a checkpoint of a model and its optimizer by the parameters' names, alike for every engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from superoffload.adamw import AdamW
from superoffload.checkpoints.tensor_files import Piece
from superoffload.cpu_adamw import CPUAdamW
from superoffload.distributed.ownership import Holding, OwnersTable, dtensor_holding, whole_holding
from superoffload.distributed.session import RankSession, plain_name
from superoffload.errors import ArgumentError
from superoffload.host.tensors import is_dtensor
from superoffload.optimizer.tracked_param import TrackedParam

_EXTRA_STATE = "_extra_state"
MODEL, MASTER, EXP_AVG, EXP_AVG_SQ = "model.", "master.", "exp_avg.", "exp_avg_sq."


def piece_of(tensor: Tensor, holding: Holding) -> Piece:
    return Piece(tuple(tensor.shape), holding.box, holding.is_flat)


def holding_of(name: str, tensor: Tensor) -> Holding:
    """Returns how this rank holds a tensor without optimizer state: a DTensor's own layout, or the whole tensor."""
    return dtensor_holding(name, tensor) if is_dtensor(tensor) else whole_holding(tensor)


@dataclass(frozen=True)
class Whole:
    """Holds the names of what all ranks together have: more than this rank where each has a part of the model."""

    groups: list[list[str]]
    names: set[str]
    aliases: dict[str, str]
    other: dict[str, Any]
    steps: dict[str, int]


@dataclass(frozen=True)
class Named:
    """Holds the model's tensors and the optimizer's parameters by plain names.

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

    def called(self, rank: int) -> str:
        """Returns the name of a rank in errors."""
        return self.session.group.hosts.rank(rank) if self.session is not None else f"rank {rank}"

    def writes(self, index: int) -> bool:
        """Returns whether this rank writes its part of a shard; the first of the ranks that own the same part does."""
        return self.session is None or self.session.writer_of(index) == self.rank

    def writes_all_of(self, holdings: Mapping[str, Holding]) -> set[str]:
        """Returns the tensors without optimizer state whose part this rank writes. Collective."""
        if self.session is None:
            return set(holdings)
        boxes = {name: (one.shape, (one.box.offsets, one.box.lengths)) for name, one in holdings.items()}
        told = self.session.group.exchange_objects("save(): parts", boxes)
        table, owners = OwnersTable(), {}
        for name, (shape, _) in boxes.items():
            holders = [(rank, theirs[name][1]) for rank, theirs in zip(self.ranks, told, strict=True) if name in theirs]
            owners[name] = table.owners(name, shape, tuple(r for r, _ in holders), [pair for _, pair in holders])
        return {name for name, one in owners.items() if one.writer_of(self.rank) == self.rank}

    @property
    def steps(self) -> dict[str, int]:
        """Returns how many steps each parameter has made that has state."""
        states = {name: self.states.get(param, {}) for name, param in self.params.items()}
        return {name: int(state["step"]) for name, state in states.items() if "step" in state}

    @property
    def has_parts(self) -> bool:
        """Tells whether the ranks have different parts of the model."""
        return self.session is not None and self.session.has_parts

    def whole(self, what: str) -> Whole:
        """Joins the names of all ranks. Collective where ranks have parts of one model."""
        names = set(self.tensors) | set(self.aliases)
        mine = Whole(self.groups, names, self.aliases, self.other, self.steps)
        if self.session is None or not self.has_parts:
            return mine
        whole = Whole([[] for _ in self.groups], set(), {}, {}, {})
        for theirs in self.session.group.exchange_objects(f"{what}: names", mine):
            if len(theirs.groups) != len(self.groups):
                raise ArgumentError(
                    f"optimizer: {len(theirs.groups)} param groups on one rank, {len(self.groups)} on this one; parts "
                    "of one model need as many groups on every rank, which may be empty"
                )
            for group, more in zip(whole.groups, theirs.groups, strict=True):
                group.extend(name for name in more if name not in group)
            whole.names.update(theirs.names)
            for all_of_them, more in ((whole.aliases, theirs.aliases), (whole.other, theirs.other)):
                all_of_them.update(more)
            whole.steps.update(theirs.steps)
        return whole

    @property
    def is_first(self) -> bool:
        return self.rank == self.ranks[0]

    @property
    def ranks(self) -> list[int]:
        return self.session.group.ranks if self.session is not None else [0]


def check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, (AdamW, torch.optim.AdamW)):
        remedy = "pass a wrapper's .optimizer (Accelerate's has one)"
        if isinstance(optimizer, CPUAdamW):
            remedy = "save its state_dict() and the model's with torch.save()"
        elif "Stage3" in type(optimizer).__name__:
            remedy = "use engine.save_checkpoint()"
        raise ArgumentError(
            f"optimizer: {type(optimizer).__name__}, expected superoffload.AdamW or torch.optim.AdamW; {remedy}"
        )


def name_everything(model: nn.Module, optimizer: Optimizer | None) -> Named:
    """Names all tensors, without ``optimizer`` the model's alone; raises for a parameter that is not the model's."""
    parts = optimizer.parts if isinstance(optimizer, AdamW) else None
    session = parts.ranks.session if parts is not None else None
    names = {id(param): plain_name(name) for name, param in model.named_parameters()}
    first: dict[Any, str] = {}
    if parts is not None and optimizer is not None and session is not None and session.has_parts:
        # A parameter that another part of the model has too, under another name, goes by the name that both were given.
        known = (parts.params.get(param) for group in optimizer.param_groups for param in group["params"])
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
    params: dict[str, Tensor] = {}
    groups = []
    for g, group in enumerate(optimizer.param_groups if optimizer is not None else ()):
        for i, param in enumerate(group["params"]):
            if id(param) not in names:
                raise ArgumentError(
                    f"optimizer: parameter {i} of group {g} is none of model's; give the model it was made for"
                )
            params[names[id(param)]] = param
        groups.append([names[id(param)] for param in group["params"]])
    modules = {plain_name(f"{name}.{_EXTRA_STATE}" if name else _EXTRA_STATE): m for name, m in model.named_modules()}
    states: Mapping[Tensor, Any] = optimizer.state if optimizer is not None else {}
    return Named(tensors, aliases, other, modules, groups, params, states, session)


def is_extra_state(name: str) -> bool:
    """Returns whether a module's ``get_extra_state`` made this entry of a state_dict."""
    return name.rpartition(".")[2] == _EXTRA_STATE


def stepped(optimizer: Optimizer, named: Named) -> Iterator[tuple[str, Tensor, TrackedParam]]:
    """Yields the parameters whose state AdamW holds."""
    assert isinstance(optimizer, AdamW)
    known = optimizer.parts.params
    for name, param in named.params.items():
        tracked = known.get(param)
        if tracked is not None:
            yield name, param, tracked


def group_values(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]


def on_all_ranks(session: RankSession | None, what: str, work: Callable[[], Any]) -> Any:
    """Runs ``work``, which changes nothing; if it raises on one rank, all ranks raise."""
    try:
        result = work()
    except Exception as error:
        if session is not None:
            session.agree(what, error)
        raise
    if session is not None:
        session.agree(what, None)
    return result


def check_extra(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    if extra is not None and not isinstance(extra, Mapping):
        raise ArgumentError(f"extra: {type(extra).__name__}, expected a dict, such as {{'scheduler': ...}}")
    return dict(extra or {})
