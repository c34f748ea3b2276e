"""Users may change param groups at any time, so groups are read whenever they are needed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import is_
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from superoffload.distributed.session import plain_name
from superoffload.engine.bucket import GroupHyper
from superoffload.optimizer.arguments import OF_TORCH, check_group, refuse_in_group, refuse_other_steps

_KEYS = ("lr", "betas", "eps", "weight_decay")
_MAY_LACK = ("maximize", "bias_correction", *OF_TORCH, "max_grad_norm")  # as groups of other optimizers do


class _Checked(NamedTuple):
    """Keeps checked hyper-parameters: the user's objects and our values of them."""

    values: tuple[Any, ...]
    hyper: GroupHyper


class ParamGroups:
    """Reads an optimizer's param groups; does not keep the optimizer alive."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._checked: dict[int, _Checked] = {}
        self._known: list[list[Tensor]] = []  # the parameters of each group that have, or will have, state

    @property
    def now(self) -> list[dict[str, Any]]:
        alive = self._optimizer()
        assert alive is not None, "the engine is used by its optimizer only"
        return alive.param_groups

    def params(self) -> list[Tensor]:
        return [param for group in self.now for param in group["params"]]

    def hyper(self, index: int) -> GroupHyper:
        """Returns the current hyper-parameters of a group; checks them if they have changed since the last call."""
        group = self.now[index]
        values = (*(group[key] for key in _KEYS), *map(group.get, _MAY_LACK))
        known = self._checked.get(index)
        if known is not None and all(map(is_, known.values, values)):
            return known.hyper
        check_group(group)
        refuse_in_group(f"param_groups[{index}]", group)
        refuse_other_steps(f"param_groups[{index}]", group)
        lr, (beta1, beta2), eps, weight_decay, maximize = values[:5]
        hyper = GroupHyper(
            float(lr), float(beta1), float(beta2), float(eps), float(weight_decay), maximize=bool(maximize)
        )
        if _are_immutable(values):
            self._checked[index] = _Checked(values, hyper)
        return hyper

    def settings(self) -> dict[str, Any]:
        """Returns the hyper-parameters, which must be the same on all ranks, by names for errors."""
        settings: dict[str, Any] = {}
        for index in range(len(self.now)):
            hyper = self.hyper(index)
            settings[f"lr of group {index}"] = hyper.lr
            others = (hyper.beta1, hyper.beta2, hyper.eps, hyper.weight_decay, hyper.maximize)
            settings[f"betas, eps, weight_decay, maximize of group {index}"] = others
        return settings

    def named(self, index: int, names: Mapping[int, str]) -> Iterator[tuple[str, Tensor]]:
        """Yields the parameters of a group with the names that the user gave them, else those in ``names``, by id."""
        yield from named_in_group(self.now[index], index, names)

    # ---- changed groups ----------------------------------------------------------------------------------

    @contextmanager
    def one_more(self, record_of: Callable[[Tensor], object | None]) -> Iterator[int]:
        """Accepts the group that ``add_param_group()`` has added and yields its index. An error takes the group out
        again, unless it came after the group's parameters had state, which ``record_of`` finds: they will train."""
        self._known.append(list(self.now[-1]["params"]))
        try:
            yield len(self.now) - 1
        except BaseException:
            if all(record_of(param) is None for param in self.now[-1]["params"]):
                self._known.pop()
                self.now.pop()
            raise

    def changed(self) -> bool:
        """Returns whether parameters are in other groups or places than ``add_param_group()`` has put them."""
        now, known = self.now, self._known
        return len(now) != len(known) or not all(
            len(group["params"]) == len(params) and all(map(is_, group["params"], params))
            for group, params in zip(now, known, strict=True)
        )

    def added(self) -> list[Tensor]:
        """Returns the parameters that were put into the groups without ``add_param_group()``."""
        known = {id(param) for params in self._known for param in params}
        return [param for param in self.params() if id(param) not in known]

    def accept(self) -> None:
        """Accepts the parameters that the groups have now."""
        self._known = [list(group["params"]) for group in self.now]


def named_in_group(
    group: Mapping[str, Any], index: int, names: Mapping[int, str] = MappingProxyType({})
) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters of group ``index`` with the names that the user gave them, else ``names``', else places."""
    own = group.get("param_names")
    if own and len(own) != len(group["params"]):  # the program has changed the parameters alone
        own = None
    for i, param in enumerate(group["params"]):
        place = f"param_groups[{index}]['params'][{i}]"
        yield plain_name(str(own[i])) if own else names.get(id(param), place), param


_PLAIN = (float, int, bool, type(None))


def _are_immutable(values: tuple[Any, ...]) -> bool:
    """Returns whether no value can change in place, as a tensor ``lr`` or a list of betas can."""
    betas = values[1]
    return type(betas) is tuple and all(type(value) in _PLAIN for value in (values[0], *betas, *values[2:]))
