"""What a program may change between steps: param groups, the norm to clip to, the loss scale. Read when it counts."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from superoffload.distributed.session import plain_name
from superoffload.engine.bucket import GroupHyper
from superoffload.engine.verdict import Verdict
from superoffload.errors import StateError, warn
from superoffload.host.numbers import as_float
from superoffload.optimizer.arguments import (
    OF_TORCH,
    check_group,
    check_max_grad_norm,
    refuse_in_group,
    refuse_other_steps,
)

_KEYS = ("lr", "betas", "eps", "weight_decay")
_MAY_LACK = ("maximize", "bias_correction", *OF_TORCH, "max_grad_norm")  # as groups of other optimizers do
_NAMED = 8  # a warning names at most so many ranks


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


# ---- the verdict's settings -----------------------------------------------------------------------------------------


class LossScale(NamedTuple):
    """Holds the values that a ``torch.amp.GradScaler`` has set on an optimizer around its ``step()``.

    ``is_set``: a scaler has set them. ``grad_scale`` None: the user called ``unscale_()``. ``found_inf``: the scaler
    saw a NaN or an infinity, which may have been replaced since.
    """

    is_set: bool
    grad_scale: Any
    found_inf: Any

    @classmethod
    def on(cls, optimizer: Any) -> LossScale:
        scale = getattr(optimizer, "grad_scale", None)
        return cls(hasattr(optimizer, "grad_scale"), scale, getattr(optimizer, "found_inf", 0.0))

    @property
    def was_taken_out(self) -> bool:
        """Returns whether the user has unscaled all gradients, which version counters do not show."""
        return self.is_set and self.grad_scale is None

    @property
    def inverse(self) -> float:
        """Returns the factor that takes the loss scale out of gradients."""
        if self.grad_scale is None:
            return 1.0
        scale = as_float(self.grad_scale)
        return 1.0 / scale if scale != 0.0 else math.inf

    @property
    def saw_inf(self) -> bool:
        return as_float(self.found_inf) > 0


class ClipSettings:
    """Keeps the norm to clip to and the loss scale, which speculation goes by, and what the last verdict was.

    ``unscale``: the factor that took the loss scale out in the last step; the next one is expected to have it again.
    """

    def __init__(self, max_grad_norm: float | None) -> None:
        self.max_grad_norm = check_max_grad_norm(max_grad_norm)
        self.unscale = 1.0
        self.last: Verdict | None = None  # of a step that had gradients
        self.step_was_skipped = False
        self._said_whose_norm = False

    @property
    def grad_norm(self) -> float:
        if self.last is None:
            raise StateError("grad_norm: there was no step() with gradients yet")
        return self.last.grad_norm

    def set_max_grad_norm(self, max_grad_norm: float | None) -> None:
        self.max_grad_norm = check_max_grad_norm(max_grad_norm)

    def decided(self, verdict: Verdict) -> None:
        self.last = verdict
        self.step_was_skipped = verdict.found_inf

    def without_gradients(self) -> None:
        """Notes a step that had nothing to step."""
        self.step_was_skipped = False

    def say_whose_norm(self, ranks: Sequence[int], world: int) -> None:
        """Warns the user once that ``max_grad_norm`` counts only ``ranks``, not all of ``world``.

        Where ranks train parts of one model, as pipeline stages do, each part would get a clip coefficient of its own.
        Where they train models of their own, that is right.
        """
        others = world - len(ranks)
        if self._said_whose_norm or self.max_grad_norm is None or not others:
            return
        names = ", ".join(map(str, ranks[:_NAMED])) + (", ..." if len(ranks) > _NAMED else "")
        warn(
            f"max_grad_norm={self.max_grad_norm:g} clips by the norm of the gradients on rank {names} "
            f"alone ({len(ranks)} of {world}), as process_group= or replicated='local' says; the other {others} are "
            "clipped by norms of their own. If all of them train the same parameters, leave process_group and "
            "replicated out. If they train parts of one model, such as pipeline stages, leave them out too, and name "
            "parameters as in the whole model (model.named_parameters()). If they train models of their own, this is "
            "right, and a filter ends the warning: "
            "warnings.filterwarnings('ignore', message='superoffload: max_grad_norm')"
        )
        self._said_whose_norm = True
