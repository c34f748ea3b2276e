"""Injects the faults that `--inject` describes, at known steps.

Every kind of event is something that real training code does or meets, and each takes another way through the
optimizer. This file loads no torch, so that help and errors are immediate.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from superoffload.errors import ArgumentError

if TYPE_CHECKING:
    from torch import Tensor

SYNTAX = """\
events are written kind@step[-last][:argument] and separated by commas; steps count from 1:
  nan@4              a NaN in the gradient that backward finishes first
  inf@9:late         +Inf in the gradient that comes last, when the other buckets are speculated already
  clip@6-8:0.05      max_grad_norm = 0.05 in steps 6 to 8
  clip@6:0.7x        max_grad_norm = 0.7 times the last gradient norm
  clip@6:0.7x:late   the same, but set between backward and step()
  again@11           a second backward before step(), without accumulate()
  drop@13            a backward whose gradients zero_grad() drops, before the proper one
  lr@15:0.5          learning rate halved between backward and step()
  raise@17           user code raises between backward and step()"""

KINDS = ("nan", "inf", "clip", "again", "drop", "lr", "raise")
_POISON = {"nan": math.nan, "inf": math.inf}
_SYNTAX = re.compile(r"(?P<kind>[a-z]+)@(?P<first>[0-9]+)(?:-(?P<last>[0-9]+))?(?::(?P<argument>.+))?")
_HELP = "expected kind@step[-last][:argument] with kind one of " + ", ".join(KINDS)


class InjectedError(Exception):
    """Stands for any exception of the user's own code; `raise@N` throws it between backward and step()."""


@dataclass(frozen=True)
class Threshold:
    """Holds a `max_grad_norm` for one step: an absolute value, or a fraction of the last finite gradient norm.

    A tight threshold known during backward stops speculation early, so there is little to replay. A late one, set
    between backward and step(), finds every bucket speculated.
    """

    value: float
    relative: bool
    late: bool

    def resolve(self, last_norm: float | None) -> float:
        if not self.relative:
            return self.value
        if last_norm is None:
            raise ArgumentError(
                f"inject=clip:{self.value:g}x: no earlier step has a finite gradient norm to "
                f"multiply by {self.value:g}; inject the clip at a later step, or give an absolute threshold"
            )
        return self.value * last_norm


@dataclass(frozen=True)
class StepEvents:
    """Describes what happens in one step. `texts` are the events as written, for tables and logs."""

    texts: tuple[str, ...] = ()
    poison: tuple[tuple[float, str], ...] = ()  # (value, "early" | "late")
    threshold: Threshold | None = None
    learning_rate_factor: float | None = None
    again: bool = False
    drop: bool = False
    raises: bool = False

    @property
    def keeps_state(self) -> bool:
        """Returns whether the step must leave every bit of the state unchanged."""
        return bool(self.poison) or self.raises


NOTHING = StepEvents()


@dataclass(frozen=True)
class _Event:
    kind: str
    step: int
    argument: str | None
    text: str


class Injection:
    """Holds the parsed events of a run, looked up by step."""

    def __init__(self, events: Sequence[_Event]) -> None:
        by_step: dict[int, list[_Event]] = {}
        for event in events:
            by_step.setdefault(event.step, []).append(event)
        self._steps = {step: _combine(group) for step, group in by_step.items()}

    def at(self, step: int) -> StepEvents:
        return self._steps.get(step, NOTHING)


def parse_injection(text: str, steps: int) -> Injection:
    """Parses an `--inject` argument for a run of `steps`; raises for an event that could never happen."""
    events = [event for item in text.split(",") if item.strip() for event in _parse_event(item.strip())]
    for event in events:
        if not 1 <= event.step <= steps:
            raise ArgumentError(
                f"inject={event.text}: step {event.step} is not in this run of steps 1 to {steps}; "
                f"choose another step or a longer --steps"
            )
        if event.kind == "clip" and event.step == 1 and _threshold(event.argument, event.text).relative:
            raise ArgumentError(f"inject={event.text}: before step 1 there is no gradient norm to take a fraction of")
    return Injection(events)


def _parse_event(item: str) -> list[_Event]:
    match = _SYNTAX.fullmatch(item)
    if match is None or match["kind"] not in KINDS:
        raise ArgumentError(f"inject={item}: {_HELP}")
    first = int(match["first"])
    last = int(match["last"]) if match["last"] else first
    if last < first:
        raise ArgumentError(f"inject={item}: the last step {last} is before the first step {first}")
    _check_argument(match["kind"], match["argument"], item)
    if last - first > 1_000_000:
        raise ArgumentError(f"inject={item}: a range of more than a million steps; give a shorter range")
    return [_Event(match["kind"], step, match["argument"], item) for step in range(first, last + 1)]


def _check_argument(kind: str, argument: str | None, item: str) -> None:
    if kind in _POISON:
        if argument not in (None, "early", "late"):
            raise ArgumentError(f"inject={item}: expected {kind}@step, {kind}@step:early or {kind}@step:late")
    elif kind == "clip":
        _threshold(argument, item)
    elif kind == "lr":
        _positive(argument, item, "a factor for the learning rate, as in lr@15:0.5")
    elif argument is not None:
        raise ArgumentError(f"inject={item}: {kind} takes no argument; write {kind}@step")


def _threshold(argument: str | None, item: str) -> Threshold:
    number, colon, place = (argument or "").partition(":")
    expected = "a threshold for the gradient norm as in clip@6:0.05, or 0.7 times the last norm as in clip@6:0.7x, "
    expected += "then :late to set it between backward and step()"
    if colon and place != "late":
        raise ArgumentError(f"inject={item}: expected {expected}")
    return Threshold(_positive(number.removesuffix("x"), item, expected), number.endswith("x"), place == "late")


def _positive(argument: str | None, item: str, expected: str) -> float:
    try:
        value = float(argument) if argument is not None else math.nan
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        raise ArgumentError(f"inject={item}: expected {expected}")
    return value


def _combine(events: Sequence[_Event]) -> StepEvents:
    kinds = [event.kind for event in events]
    for event in events:
        if kinds.count(event.kind) > 1:
            raise ArgumentError(f"inject={event.text}: step {event.step} has {event.kind} twice; give it once")
    by_kind = {event.kind: event for event in events}
    clip, rate = by_kind.get("clip"), by_kind.get("lr")
    return StepEvents(
        texts=tuple(event.text for event in events),
        poison=tuple((_POISON[event.kind], event.argument or "early") for event in events if event.kind in _POISON),
        threshold=_threshold(clip.argument, clip.text) if clip else None,
        learning_rate_factor=float(rate.argument) if rate and rate.argument else None,
        again="again" in kinds,
        drop="drop" in kinds,
        raises="raise" in kinds,
    )


@contextmanager
def poisoned(events: StepEvents, earliest: Tensor, latest: Tensor) -> Iterator[None]:
    """Makes backward put the step's NaN or Inf into one element of a gradient as it comes out of autograd.

    A tensor hook runs before the gradient is accumulated, so the optimizer's own hook sees the change; changing
    `p.grad` afterwards would come too late for a bucket that was already speculated.
    """
    handles = [
        (latest if place == "late" else earliest).register_hook(_poison_with(value)) for value, place in events.poison
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _poison_with(value: float) -> Callable[[Tensor], Tensor]:
    def hook(gradient: Tensor) -> Tensor:
        changed = gradient.clone().contiguous()
        changed.view(-1)[gradient.numel() // 2] = value
        return changed

    return hook
