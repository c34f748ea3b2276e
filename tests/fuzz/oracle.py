"""torch's AdamW beside the run that waits, one step at a time: from the same state, parameters and gradients.

So the tolerance is that of one step whatever a program does, and between steps every bit of the state must stay.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from superoffload import AdamW
from tests.support.split_masters import away, bits_of

_STATED = 1e-6  # of the larger of the weight and the learning rate: README
_DENORMAL = 3e-45


class Differs(AssertionError):
    """From torch, or from what it was where nothing should have changed."""


@dataclass
class ParamState:
    """A copy of one parameter's state, and of the parameter."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    steps: int
    value: Tensor


@dataclass
class Expected:
    """After a step: ``stepped``, or left as it was."""

    state: ParamState
    stepped: bool
    lr: float
    gradient: Tensor  # as it counts: unscaled and clipped


def same(one: Tensor, other: Tensor) -> bool:
    word = torch.int32 if one.dtype is torch.float32 else torch.int16
    return torch.equal(one.detach().view(word), other.detach().view(word))


def follow(master: Tensor, value: Tensor) -> Tensor:
    """What a user wrote wins; where the parameter is a rounding of the master, the master stays."""
    kept = bits_of(master.to(value.dtype)) == bits_of(value)
    if value.dtype is torch.bfloat16:
        kept |= bits_of(away(master)) == bits_of(value)
    return torch.where(kept, master, value.detach().float())


class Oracle:
    """Looks at an optimizer with speculation="never" and eager delivery."""

    def __init__(self, optimizer: AdamW, *, compares: bool, split: bool) -> None:
        self._optimizer = optimizer
        self._split = split  # masters of bf16 parameters, which are rounded away from zero at ties
        self._compares = compares  # else moments are rounded at random, and torch cannot tell
        self._moments = torch.float32 if compares else torch.bfloat16
        self._known: dict[Tensor, ParamState] = {}
        self._written: set[Tensor] = set()
        self._expected: dict[Tensor, Expected] = {}
        self.steps = 0

    def written(self, params: Iterable[Tensor]) -> None:
        """By the user; from here on the master follows at a moment that is ours to choose."""
        self._written.update(params)

    # ---- a step -------------------------------------------------------------------------------------------------

    def before(self, unscale: float) -> None:
        """Works out what ``step()`` will do."""
        params = [(group, param) for group in self._optimizer.param_groups for param in group["params"]]
        gradients = [param.grad for _, param in params if param.grad is not None]
        factor = self._factor(gradients, unscale)
        self._expected = {}
        for group, param in params:
            begin = self._begin(param)
            if begin is None:
                continue
            stepped = param.grad is not None and factor is not None
            gradient = param.grad.float() * factor if stepped else torch.zeros(())
            if stepped:
                _step(begin, gradient, group)
            self._expected[param] = Expected(begin, stepped, float(group["lr"]), gradient)
        self.steps += bool(gradients)

    def _factor(self, gradients: list[Tensor], unscale: float) -> float | None:
        """None: the step is skipped."""
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients)) * unscale
        if not math.isfinite(norm):
            return None
        limit = self._optimizer.max_grad_norm
        return unscale if limit is None else unscale * min(1.0, limit / (norm + 1e-6))

    def _begin(self, param: Tensor) -> ParamState | None:
        now = self._read(param)
        if now is None:
            if param.grad is None:
                return None
            value = param.detach().clone()
            nothing = torch.zeros(value.shape, dtype=self._moments)
            return ParamState(value.float().clone(), nothing, nothing.clone(), 0, value)
        known = self._known.get(param)
        if known is not None:
            self._check("before step()", now, known, master=param not in self._written)
        now.master = follow(now.master, param)
        now.exp_avg, now.exp_avg_sq = now.exp_avg.to(self._moments), now.exp_avg_sq.to(self._moments)
        return now

    def after(self) -> None:
        for param, expected in self._expected.items():
            now = self._read(param)
            if now is None:
                if expected.stepped:
                    raise Differs("stepped: no state is shown")
                continue  # never had a gradient that counted
            if not expected.stepped:
                self._check("not stepped", now, expected.state, value=True)
            else:
                self._check_stepped(now, expected)
            self._known[param] = now
        self._written.clear()

    def _check_stepped(self, now: ParamState, expected: Expected) -> None:
        then = expected.state
        if now.steps != then.steps:
            raise Differs(f"count of steps: {now.steps}, torch counts {then.steps}")
        dtype = now.value.dtype
        rounded = away(now.master) if self._split and dtype is torch.bfloat16 else now.master.to(dtype)
        if not same(now.value, rounded):
            raise Differs("published: not the master's rounding")
        if self._compares:
            weight = torch.maximum(now.master.abs(), then.value.float().abs()).clamp(min=expected.lr)
            _compare("master", now.master, then.master, weight)
            _compare("exp_avg", now.exp_avg, then.exp_avg, torch.maximum(then.exp_avg.abs(), expected.gradient.abs()))
            _compare("exp_avg_sq", now.exp_avg_sq, then.exp_avg_sq, then.exp_avg_sq)

    def edited(self, params: Iterable[Tensor]) -> None:
        """The program has edited their state."""
        for param in params:
            self._known.pop(param, None)

    # ---- saving and loading -------------------------------------------------------------------------------------

    def copy(self, params: Iterable[Tensor]) -> dict[Tensor, ParamState | None]:
        return {param: self._read(param) for param in params}

    def loaded(self, saved: Mapping[Tensor, ParamState | None]) -> None:
        """The state must be that which was saved, to the bit."""
        for param, then in saved.items():
            now = self._read(param)
            if then is not None:
                if now is None:
                    raise Differs("loaded: state that was saved is not there")
                self._check("loaded", now, then, value=True)
            if now is not None:
                self._known[param] = now
                self._written.add(param)

    def _read(self, param: Tensor) -> ParamState | None:
        state: Any = self._optimizer.state.get(param)
        if not state:
            return None
        master, exp_avg, exp_avg_sq = (state[name].clone() for name in ("master", "exp_avg", "exp_avg_sq"))
        return ParamState(master, exp_avg, exp_avg_sq, int(state["step"]), param.detach().clone())

    def _check(self, when: str, now: ParamState, then: ParamState, *, master: bool = True, value: bool = False) -> None:
        for name in ("exp_avg", "exp_avg_sq", *["master"] * master, *["value"] * value):
            if not same(getattr(now, name), getattr(then, name)):
                raise Differs(f"{when}: {name} changed")
        if now.steps != then.steps:
            raise Differs(f"{when}: step {now.steps}, expected {then.steps}")


def _step(state: ParamState, gradient: Tensor, group: Mapping[str, Any]) -> None:
    """In place, by torch."""
    steps = torch.tensor(float(state.steps))
    state.exp_avg, state.exp_avg_sq = state.exp_avg.float(), state.exp_avg_sq.float()
    options: dict[str, Any] = {name: group[name] for name in ("lr", "weight_decay", "eps", "maximize")}
    options["beta1"], options["beta2"] = map(float, group["betas"])
    options |= dict.fromkeys(("foreach", "capturable", "differentiable", "fused", "amsgrad"), False)
    adamw([state.master], [gradient], [state.exp_avg], [state.exp_avg_sq], [], [steps], **options)
    state.steps += 1


def _compare(name: str, ours: Tensor, theirs: Tensor, size: Tensor) -> None:
    fine = (ours == theirs) | ((ours - theirs).abs() <= _STATED * size + _DENORMAL) | (ours.isnan() & theirs.isnan())
    if not bool(fine.all()):
        worst = int((~fine).nonzero()[0])
        raise Differs(f"beside torch: {name}[{worst}] is {ours[worst].item()!r}, torch's {theirs[worst].item()!r}")
