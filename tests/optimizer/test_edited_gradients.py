"""Gradients that are dropped, edited, replaced or set by hand between backward and step(): the step is torch's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW
from tests.support.adamw_training import batch, check_counters, model_of
from tests.support.checkout import ROOT


def test_a_hook_that_takes_the_gradient_away() -> None:
    model = model_of()
    first, *_ = model.parameters()

    def take(param: Tensor) -> None:
        param.grad = None

    first.register_post_accumulate_grad_hook(take)  # before the optimizer's own
    with AdamW(model.parameters(), speculation="always") as optimizer:
        before = first.detach().clone()
        batch(model, 0).backward()
        optimizer.step()
        assert torch.equal(first, before)
        assert float(optimizer.state[first]["step"]) == 0


NOTICE = "gradients changed between backward and step"
Edit = Callable[[Any, int], Any]


def clip(model: nn.Module, step: int) -> None:
    """Clips as the usual loop does: also in steps that are below the threshold, all gradients are multiplied (by 1)."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9 if step % 2 else 0.1)


def notices(edit: Edit, *, steps: int = 6, speculation: str = "always", **options: Any) -> tuple[list[str], AdamW]:
    """What was said, each after its step and how many buckets had been undone in it."""
    model = model_of()
    with (
        warnings.catch_warnings(record=True) as caught,
        AdamW(model.parameters(), speculation=speculation, threads=1, bucket_numel=256, **options) as optimizer,
    ):
        warnings.simplefilter("always")
        said: list[str] = []
        for step in range(steps):
            optimizer.zero_grad()
            batch(model, step).backward()
            edit(model, step)
            before = optimizer.stats()["buckets_undone"]
            optimizer.step()
            undone = optimizer.stats()["buckets_undone"] - before
            said += [f"{step}: {undone}: {one.message}" for one in caught if NOTICE in str(one.message)]
            assert {one.filename for one in caught} <= {__file__}, "the line that called step()"
            caught.clear()
        check_counters(optimizer)
    return said, optimizer


def test_clipping_by_hand_is_said_once_with_what_to_do() -> None:
    said, optimizer = notices(clip)
    assert len(said) == 1 and said[0].startswith("1: 2: superoffload: "), "in the second step, and never again"
    assert "so all 2 buckets that were stepped during backward had to be undone" in said[0]
    assert optimizer.stats()["buckets_undone"] > 2 * 2, "it goes on, and is not said again"
    for part in ("remove that: superoffload.AdamW(max_grad_norm=) clips", "optimizer.grad_norm", "register_hook"):
        assert part in said[0]
    assert NOTICE in (ROOT / "docs/troubleshooting.md").read_text()


@pytest.mark.parametrize(
    ("edit", "options"),
    [
        (lambda model, step: None, {"max_grad_norm": 1e-3}),
        (lambda model, step: None if step % 2 else clip(model, 0), {}),
        (lambda model, step: model[0].bias.grad.mul_(0.5), {}),
        (lambda model, step: batch(model, 100 + step).backward(), {}),
    ],
    ids=["clips of ours", "every other step", "one gradient", "a second backward"],
)
def test_no_false_alarm(edit: Edit, options: dict[str, Any]) -> None:
    said, optimizer = notices(edit, **options)
    assert said == [] and optimizer.stats()["steps"] in (0, 6)
