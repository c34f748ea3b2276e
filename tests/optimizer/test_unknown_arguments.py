"""Keyword arguments that do not exist: the error names them, what was meant, and what there is."""

from __future__ import annotations

import inspect
from contextlib import closing
from typing import Any

import pytest
import torch

import superoffload
from superoffload.errors import ArgumentError, UnknownArgument, WrongType


def params() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(4))]


BOTH: list[Any] = [superoffload.AdamW, superoffload.CPUAdamW]
OFF = dict.fromkeys(["amsgrad", "maximize", "capturable", "differentiable", "foreach", "fused"], False)


def stepped(optimizer: Any) -> None:
    (param,) = optimizer.param_groups[0]["params"]
    param.grad = torch.ones(4)
    optimizer.step()


@pytest.mark.parametrize("optimizer", BOTH)
def test_what_torch_does_by_default_and_its_loops_may_be_chosen(optimizer: Any) -> None:
    defaults = inspect.signature(torch.optim.AdamW).parameters
    for values in (OFF, {name: defaults[name].default for name in OFF}, {"foreach": True}, {"fused": True}):
        group = {"params": params(), **values}
        for made in (optimizer(params(), **values), optimizer([group], **values)):
            made.add_param_group({"params": params(), **values})
            made.load_state_dict(made.state_dict())
            made.param_groups[0].update(values)
            stepped(made)
            made.close()


def _refuses(optimizer: Any, asked: dict[str, Any], why: str, **arguments: Any) -> None:
    """Refuses a key of a group in the constructor, in an added group, in a loaded one, and when it changes later."""
    at_first = rf"param_groups\[0\]: {why}"
    with pytest.raises(ArgumentError, match=at_first):
        optimizer([asked], **arguments)
    with closing(optimizer(params(), **arguments)) as made:
        with pytest.raises(ArgumentError, match=at_first):
            made.add_param_group(asked)
        saved = made.state_dict()
        saved["param_groups"][0].update({key: value for key, value in asked.items() if key != "params"})
        with pytest.raises(ArgumentError, match=rf"state_dict: group 0: {why}"):
            made.load_state_dict(saved)
        stepped(made)
        before = made.param_groups[0]["params"][0].detach().clone()
        made.param_groups[0].update({key: value for key, value in asked.items() if key != "params"})
        with pytest.raises(ArgumentError, match=at_first):
            stepped(made)
        assert torch.equal(made.param_groups[0]["params"][0], before)


@pytest.mark.parametrize("optimizer", BOTH)
def test_what_is_not_done_is_refused_wherever_it_is_asked_for(optimizer: Any) -> None:
    for name, value, why in (
        *(("foreach", value, "it chooses torch's loop") for value in (1, "yes")),
        *(("capturable", value, ".*or pass capturable=False") for value in (True, 1, 0, "no", None)),
    ):
        with pytest.raises(UnknownArgument, match=rf"{name}={value!r}: no such argument; {why}"):
            optimizer(params(), **{name: value})
    with closing(optimizer([{"params": params(), "capturable": True}])) as made:  # as torch.compile sets it in groups
        stepped(made)
        assert made.state_dict()["param_groups"][0]["capturable"] is False
    decoupled = "decoupled_weight_decay"
    asked: list[tuple[str, Any, str]] = [
        ("amsgrad", True, r"amsgrad=True: torch.optim.AdamW has it .*or set amsgrad=False"),
        ("differentiable", True, r"differentiable=True: torch.optim.AdamW has it .*or set differentiable=False"),
        ("maximize", 1, "maximize=1: expected True or False"),
        (decoupled, False, f"{decoupled}=False, so it is of Adam with an L2 penalty, and this optimizer is AdamW"),
    ]
    for name, value, why in asked:
        _refuses(optimizer, {"params": params(), name: value}, why)
    optimizer([{"params": params(), decoupled: False, "weight_decay": 0.0}]).close()
    if optimizer is superoffload.CPUAdamW:
        why = f"{decoupled}=True, so it is of AdamW, and this optimizer is Adam with an L2 penalty"
        _refuses(optimizer, {"params": params(), decoupled: True}, why, l2=True)


WRONG: dict[str, Any] = {
    "a bare tensor": params()[0],
    "a list in a list": [params()],
    "a parameter among groups": [{"params": params()}, *params()],
    "a number": 5,
    "a group of a number": [{"params": 5}],
    "a set in a group": [{"params": set(params())}],
    "a name without a parameter": [("weight", 1)],
}


def test_params_of_a_wrong_type_are_a_type_error_as_in_torch_and_wrong_values_are_not() -> None:
    for what, wrong in WRONG.items():
        with pytest.raises(TypeError):
            torch.optim.AdamW(wrong)
        for optimizer in BOTH:
            with pytest.raises(WrongType, match=r"expected") as caught:
                optimizer(wrong)
            assert isinstance(caught.value, TypeError) and isinstance(caught.value, ValueError), what
    for values in ([], [torch.zeros(4) * params()[0]], [("a", params()[0]), params()[0]]):
        for optimizer in BOTH:
            with pytest.raises(ArgumentError) as refused:
                optimizer(values)
            assert not isinstance(refused.value, TypeError)


def test_the_argument_that_was_meant_is_named() -> None:
    given: dict[str, Any]
    for name in ("grad_clip", "max_norm", "clip_grad_norm", "gradient_clipping", "clip", "grad_norm"):
        given = {name: 1.5}
        with pytest.raises(UnknownArgument, match=rf"^{name}=1.5: no such argument; did you mean max_grad_norm, "):
            superoffload.AdamW(params(), **given)
        with pytest.raises(UnknownArgument, match=r"this one does not clip: call torch.nn.utils.clip_grad_norm_"):
            superoffload.CPUAdamW(params(), **given)
    others = {"weightdecay": "weight_decay", "beta1": "betas", "num_threads": "threads", "learning_rate": "lr"}
    for name, meant in others.items():
        given = {name: 3}
        with pytest.raises(UnknownArgument, match=rf"{name}=3: no such argument; did you mean {meant}\?"):
            superoffload.AdamW(params(), **given)


def test_the_error_is_of_both_kinds_and_lists_everything() -> None:
    for optimizer in BOTH:
        with pytest.raises(UnknownArgument) as caught:
            optimizer(params(), zebra=params(), amsgrad=True)
        assert isinstance(caught.value, ArgumentError) and isinstance(caught.value, TypeError)
        message = str(caught.value)
        assert "zebra=<list>: no such argument; nothing here has a similar name." in message
        assert "amsgrad=True: no such argument; torch.optim.AdamW has it" in message
        accepted = list(inspect.signature(optimizer).parameters)[:-1]
        assert message.endswith(f"{optimizer.__name__} accepts {', '.join(accepted)}")
