"""Parsing of `--inject`, and what the injected events do to gradients."""

from __future__ import annotations

import math

import pytest
import torch

from superoffload.errors import ArgumentError
from superoffload.tools.cli.verify import DEFAULT_INJECTION, DEFAULTS
from superoffload.tools.train.injection import KINDS, NOTHING, Threshold, parse_injection, poisoned


def test_every_kind_is_parsed_to_its_step() -> None:
    plan = parse_injection("nan@4, inf@9:late,clip@6-8:0.05,again@11,drop@13,lr@15:0.5,raise@17", steps=20)
    assert math.isnan(plan.at(4).poison[0][0]) and plan.at(4).poison[0][1] == "early"
    assert plan.at(9).poison == ((math.inf, "late"),)
    assert [plan.at(step).threshold for step in (5, 6, 7, 8, 9)] == [
        None,
        *[Threshold(0.05, relative=False, late=False)] * 3,
        None,
    ]
    assert plan.at(11).again and plan.at(13).drop and plan.at(17).raises
    assert plan.at(15).learning_rate_factor == 0.5
    assert plan.at(1) == NOTHING


def test_relative_and_late_thresholds() -> None:
    plan = parse_injection("clip@2:0.7x,clip@3:0.7x:late,clip@4:2:late", steps=9)
    assert plan.at(2).threshold == Threshold(0.7, relative=True, late=False)
    assert plan.at(3).threshold == Threshold(0.7, relative=True, late=True)
    assert plan.at(4).threshold == Threshold(2.0, relative=False, late=True)


def test_several_events_in_one_step() -> None:
    events = parse_injection("again@3,lr@3:2,nan@3,inf@3:late", steps=3).at(3)
    assert events.again and events.learning_rate_factor == 2.0 and len(events.poison) == 2
    assert events.texts == ("again@3", "lr@3:2", "nan@3", "inf@3:late")


@pytest.mark.parametrize("text, expected", [("nan@2", True), ("raise@2", True), ("clip@2:1", False), ("drop@2", False)])
def test_which_events_must_leave_the_state_alone(text: str, expected: bool) -> None:
    assert parse_injection(text, steps=2).at(2).keeps_state is expected


def test_empty_text_is_no_event() -> None:
    for text in ("", " , "):
        assert all(parse_injection(text, steps=5).at(step) is NOTHING for step in range(1, 6))


@pytest.mark.parametrize(
    "text",
    [
        "nan",
        "nan@",
        "nan@x",
        "nan@4:middle",
        "nan4",
        "boom@3",
        "clip@3",
        "clip@3:",
        "clip@3:x",
        "clip@3:-1",
        "clip@3:nan",
        "clip@3:0.5:early",
        "clip@1-3:0.5x",
        "lr@3",
        "lr@3:0",
        "lr@3:fast",
        "again@3:2",
        "drop@5-3",
        "raise@0",
        "raise@21",
        "clip@19-21:1",
        "nan@3,nan@3:late",
        "clip@1-9999999999:1",
    ],
)
def test_bad_syntax_is_named(text: str) -> None:
    with pytest.raises(ArgumentError, match="inject=") as raised:
        parse_injection(text, steps=20)
    assert text.split(",")[0].split("@")[0] in str(raised.value)


def test_relative_threshold_needs_an_earlier_norm() -> None:
    relative = Threshold(0.5, relative=True, late=False)
    assert relative.resolve(4.0) == 2.0
    assert Threshold(0.5, relative=False, late=False).resolve(4.0) == 0.5
    with pytest.raises(ArgumentError, match="no earlier step"):
        relative.resolve(None)


def test_default_injection_has_every_kind_and_fits_the_default_steps() -> None:
    assert {item.split("@")[0] for item in DEFAULT_INJECTION.split(",")} == set(KINDS)
    parse_injection(DEFAULT_INJECTION, DEFAULTS.steps)  # raises for an event after the last step


def test_poison_is_in_the_gradient_when_the_optimizer_hook_sees_it() -> None:
    early, late = (torch.nn.Parameter(torch.ones(2, 4)) for _ in range(2))
    seen: list[int] = []
    late.register_post_accumulate_grad_hook(lambda p: seen.append(int(p.grad.isinf().sum())))
    events = parse_injection("nan@1,inf@1:late", steps=1).at(1)
    with poisoned(events, early, late):
        (early.sum() + late.sum()).backward()
    assert early.grad is not None and late.grad is not None
    assert int(early.grad.isnan().sum()) == 1
    assert seen == [1], "the post-accumulate hook, where optimizers listen, must see the Inf"
    assert int(late.grad.isinf().sum()) == 1

    for parameter in (early, late):
        parameter.grad = None
    (early.sum() + late.sum()).backward()
    assert torch.equal(late.grad, torch.ones(2, 4)), "the event must not outlive its step"
