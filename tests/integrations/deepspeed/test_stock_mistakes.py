"""What stock ZeRO-Offload gets wrong, ours right; each test records what the peer does today (0.19.8)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.compatibility import compat
from tests.support.deepspeed.ranks import Ranks
from tests.support.deepspeed.recorded_reference import NAME, UNUSED, gradients_of, reference
from tests.support.deepspeed.scenarios import CLIP_SOME, WAYS, Scenario, distance
from tests.support.deepspeed.training import Recorded, end, masters


def train_with_gaps(
    way: str, accumulation: int, skips: dict[tuple[int, int], tuple[int, ...]], poison_step: int | None
) -> tuple[dict[str, Tensor], list[bool]]:
    scenario = Scenario(
        {"precision": "fp32", "clip": CLIP_SOME, "accumulation": accumulation},
        micros=accumulation,
        poison={} if poison_step is None else {poison_step: (1, UNUSED, float("inf"))},
    )
    engine = scenario.engine(*WAYS[way])
    applied = []
    for step in range(6):
        for micro in range(accumulation):
            poison = None
            if step == poison_step and torch.distributed.get_rank() == 1:
                poison = {UNUSED: math.inf}
            loss = engine(step, micro, skips.get((step, micro), ()), poison)
            engine.backward(loss)
            engine.step()
        applied.append(bool(engine.was_step_applied()))
    found = {name: value.clone() for name, value in masters(engine).items()}
    end(engine)
    return found, applied


OURS = ("ours, later", "match")


@compat("a step with some or no gradients", "deepspeed")
def test_an_unused_parameter_is_not_stepped_with_an_old_gradient(two_ranks: Ranks) -> None:
    skips = {(2, 0): (UNUSED,), (3, 0): (UNUSED,)}
    expected = reference([[gradients_of(step, 0, skips.get((step, 0), ()))] for step in range(6)], 1, CLIP_SOME)
    for way in OURS:
        found, _ = two_ranks.run(train_with_gaps, way, 1, skips, None)[0]
        assert distance(expected, found) < 1e-4, way
    stock, _ = two_ranks.run(train_with_gaps, "stock", 1, skips, None)[0]
    assert distance({NAME: expected[NAME]}, stock) > 1e-2, "stock no longer uses the gradient of the step before"


def test_an_unused_parameter_survives_an_infinite_gradient_before(two_ranks: Ranks) -> None:
    skips = {(3, 0): (UNUSED,)}
    windows = [[gradients_of(step, 0, skips.get((step, 0), ()))] for step in range(6)]
    expected = reference(windows, 1, CLIP_SOME, skip={2})
    for way in OURS:
        found, applied = two_ranks.run(train_with_gaps, way, 1, skips, 2)[0]
        assert applied == [True, True, False, True, True, True]
        assert distance(expected, found) < 1e-4, way
    stock, _ = two_ranks.run(train_with_gaps, "stock", 1, skips, 2)[0]
    assert not bool(torch.isfinite(stock[NAME]).all()), "stock's master no longer becomes NaN"


def test_a_parameter_used_late_in_the_window_starts_from_zero(two_ranks: Ranks) -> None:
    skips = {(step, 0): (UNUSED,) for step in range(6)}  # used in the second micro-batch only
    windows = [[gradients_of(step, 0, (UNUSED,)), gradients_of(step, 1)] for step in range(6)]
    expected = reference(windows, 2, CLIP_SOME)
    for way in OURS:
        found, _ = two_ranks.run(train_with_gaps, way, 2, skips, None)[0]
        assert distance(expected, found) < 1e-4, way
    stock, _ = two_ranks.run(train_with_gaps, "stock", 2, skips, None)[0]
    assert distance({NAME: expected[NAME]}, stock) > 1e-2, "stock no longer adds to the window before"


def test_a_parameter_used_early_in_the_window_counts(two_ranks: Ranks) -> None:
    skips = {(step, 1): (UNUSED,) for step in range(6)}  # used in the first micro-batch only
    windows = [[gradients_of(step, 0), gradients_of(step, 1, (UNUSED,))] for step in range(6)]
    expected = reference(windows, 2, CLIP_SOME)
    for way in OURS:
        found, _ = two_ranks.run(train_with_gaps, way, 2, skips, None)[0]
        assert distance(expected, found) < 1e-4, way
    stock, _ = two_ranks.run(train_with_gaps, "stock", 2, skips, None)[0]
    assert distance({NAME: expected[NAME]}, stock) > 1e-2, "stock no longer drops that gradient"


def growing_scale(way: str) -> list[float]:
    """fp16 whose scale doubles at every step: DeepSpeed divides by the doubled one."""
    scenario = Scenario({"precision": "fp16"})
    configured = Scenario(scenario.config)
    offload, options = WAYS[way]
    from tests.support.deepspeed.training import config, make_engine

    configuration = config(offload, precision="fp16", options=options)
    configuration["fp16"].update(initial_scale_power=4, loss_scale_window=1)
    engine = make_engine(configuration, configured.model())
    record = configured.train(engine, range(4))
    end(engine)
    return [float(norm) for norm in record["norms"]]


@compat("GradScaler", "deepspeed", note="as DeepSpeed's own loss scaler")
def test_the_norm_at_growth_of_the_loss_scale(two_ranks: Ranks) -> None:
    stock = two_ranks.run(growing_scale, "stock")[0]
    assert two_ranks.run(growing_scale, "match")[0] == stock
    for way in ("ours", "ours, later"):
        ours = two_ranks.run(growing_scale, way)[0]
        assert ours[0] == pytest.approx(stock[0], rel=1e-5) or ours[0] == pytest.approx(2 * stock[0], rel=1e-5)
        assert ours[2:] == pytest.approx([2 * norm for norm in stock[2:]], rel=1e-5)


def hyper_parameters(change: dict[str, Any], kind: str) -> tuple[dict[str, Tensor], list[Tensor]]:
    """What upstream's SuperOffload ignores: weight decay, betas, adam_w_mode and bias_correction."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    import superoffload.integrations.deepspeed as ours

    ours.enable()  # before DeepSpeedCPUAdam, so that its kernel is not compiled
    torch.manual_seed(1)
    model = Recorded()
    optimizer = DeepSpeedCPUAdam(
        model.parameters(),
        lr=3e-3,
        weight_decay=0.1,
        bias_correction=change.get("bias_correction", True),
        adamw_mode=kind == "AdamW",
    )
    from tests.support.deepspeed.training import config, make_engine

    configuration = config(precision="fp32", clip=0.0, options={"speculation": "always"})
    del configuration["optimizer"]
    engine = make_engine(configuration, model, optimizer=optimizer)
    for step in range(6):
        if step == 3:
            engine.optimizer.param_groups[0].update({key: v for key, v in change.items() if key != "bias_correction"})
        loss = engine(step)
        engine.backward(loss)
        engine.step()
    found = {name: value.clone() for name, value in masters(engine).items()}
    end(engine)
    return found, []


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"lr": 1e-2, "weight_decay": 0.5}, "AdamW"),
        ({"betas": (0.5, 0.7), "eps": 1e-3}, "AdamW"),
        ({"bias_correction": False}, "AdamW"),
        ({"weight_decay": 0.5}, "Adam"),
    ],
    ids=str,
)
def test_hyper_parameters_are_those_of_the_groups(change: dict[str, Any], kind: str, two_ranks: Ranks) -> None:
    torch.manual_seed(1)
    model = Recorded()
    values: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}
    state = [(torch.zeros_like(p), torch.zeros_like(p)) for p in model.parameters()]
    for step in range(6):
        if step == 3:
            values.update(change)
        for index, (param, (first, second)) in enumerate(zip(model.parameters(), state, strict=True)):
            grad = gradients_of(step, 0)[index]
            _adam(param.data, grad, first, second, step + 1, kind, change.get("bias_correction", True), values)
    found, _ = two_ranks.run(hyper_parameters, change, kind)[0]
    assert distance({name: param.detach() for name, param in model.named_parameters()}, found) < 1e-4


def _adam(
    param: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    step: int,
    kind: str,
    corrected: bool,
    values: dict[str, Any],
) -> None:
    """The textbook, in plain torch."""
    beta1, beta2 = values["betas"]
    if kind == "Adam":
        grad = grad + values["weight_decay"] * param
    else:
        param.mul_(1 - values["lr"] * values["weight_decay"])
    first.mul_(beta1).add_(grad, alpha=1 - beta1)
    second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    bias1, bias2 = (1 - beta1**step, 1 - beta2**step) if corrected else (1.0, 1.0)
    param.sub_(values["lr"] / bias1 * first / ((second / bias2).sqrt() + values["eps"]))
