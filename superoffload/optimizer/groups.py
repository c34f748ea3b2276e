"""Param groups belong to their user, who may change them between any two lines: they are read when they are needed."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from superoffload.engine.bucket import GroupHyper
from superoffload.optimizer.arguments import check_group

_KEYS = ("lr", "betas", "eps", "weight_decay")


class _Checked(NamedTuple):
    """Keeps hyper-parameters that were checked: the objects themselves, and what they came to."""

    values: tuple[Any, ...]
    hyper: GroupHyper


class ParamGroups:
    """Reads an optimizer's param groups, which users may change at any time; does not keep the optimizer alive."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._checked: dict[int, _Checked] = {}
        self._firsts: list[int] = []  # id of the first parameter of each group

    @property
    def now(self) -> list[dict[str, Any]]:
        alive = self._optimizer()
        assert alive is not None, "the core is used by its optimizer only"
        return alive.param_groups

    def params(self) -> list[Tensor]:
        return [param for group in self.now for param in group["params"]]

    def hyper(self, index: int) -> GroupHyper:
        """Of one group, as they are now; those that were changed since they were last asked for are checked."""
        group = self.now[index]
        values = tuple(group[key] for key in _KEYS)
        known = self._checked.get(index)
        if known is not None and all(map(is_, known.values, values)):
            return known.hyper
        check_group(group)
        lr, (beta1, beta2), eps, weight_decay = values
        hyper = GroupHyper(float(lr), float(beta1), float(beta2), float(eps), float(weight_decay))
        if _are_immutable(values):
            self._checked[index] = _Checked(values, hyper)
        return hyper

    def settings(self) -> dict[str, Any]:
        """The hyper-parameters, by names for errors: they must be the same on all ranks."""
        settings: dict[str, Any] = {}
        for index in range(len(self.now)):
            hyper = self.hyper(index)
            settings[f"lr of group {index}"] = hyper.lr
            others = (hyper.beta1, hyper.beta2, hyper.eps, hyper.weight_decay)
            settings[f"betas, eps, weight_decay of group {index}"] = others
        return settings

    def named(self, index: int, names: Mapping[int, str]) -> Iterator[tuple[str, Tensor]]:
        """Parameters of one group, by ``names`` of their ids where these have them."""
        group = self.now[index]
        own = group.get("param_names")
        for i, param in enumerate(group["params"]):
            name = str(own[i]) if own else f"param_groups[{index}]['params'][{i}]"
            yield names.get(id(param), name), param

    # ---- parameters that others put in their place ------------------------------------------------------------

    def one_more(self) -> int:
        """The index of the last group, which was added in the way that torch has for it."""
        self._firsts.append(_first_of(self.now[-1]))
        return len(self.now) - 1

    def replaced(self) -> bool:
        """Whether parameters were put into groups, or groups were made, in another way."""
        return self._firsts != [_first_of(group) for group in self.now]

    def accept(self) -> None:
        """The parameters that there are now are those to train."""
        self._firsts = [_first_of(group) for group in self.now]


def _first_of(group: Mapping[str, Any]) -> int:
    return id(group["params"][0]) if group["params"] else 0


def _are_immutable(values: tuple[Any, ...]) -> bool:
    """Not a learning rate that is a tensor, nor betas that are a list: these change while they stay the same object."""
    betas = values[1]
    return type(betas) is tuple and all(type(value) in (float, int) for value in (values[0], *betas, *values[2:]))
