"""torch.compile and offload together: as the eager run within the compiler's rounding, and to the bit in every mode.
Over ranks: tests/integrations/test_fsdp2.py."""

from __future__ import annotations

import shutil
import warnings
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import nn

from superoffload import AdamW, CPUAdamW
from superoffload.optimizer.lifetime import keep_from_compiler
from tests.support.adamw_training import model_of, weights

COMPILER = shutil.which("g++") or shutil.which("c++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="torch.compile on the CPU needs a C++ compiler (g++)")
STEPS = 20


def train(mode: str, *, compiled: bool) -> tuple[nn.Module, list[float], dict[str, str]]:
    model = model_of()
    run: Any = torch.compile(model) if compiled else model
    losses = []
    with AdamW(model.parameters(), lr=3e-3, speculation=mode, max_grad_norm=2.0, threads=1) as optimizer:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = (run(inputs(step)) - targets(step)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return model, losses, optimizer.state_digests()


def inputs(step: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(step % 4))


def targets(step: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(100 + step % 4))


@needs_compiler
@pytest.mark.over_stand_in
def test_one_process() -> None:
    compiled = {mode: train(mode, compiled=True) for mode in ("always", "never")}
    model, losses, digests = compiled["always"]
    assert digests == compiled["never"][2]
    assert losses == compiled["never"][1]
    eager_model, eager_losses, _ = train("always", compiled=False)
    assert losses == pytest.approx(eager_losses, rel=1e-4)
    torch.testing.assert_close(weights(model), weights(eager_model), rtol=1e-3, atol=1e-4)  # a wrong step: 3e-3
    assert losses[-1] < 0.7 * losses[0]


def clips_itself(model: nn.Module, optimizer: Any, step: int) -> None:
    (model(inputs(step)) - targets(step)).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()


def schedules(model: nn.Module, optimizer: Any, step: int) -> None:
    for group in optimizer.param_groups:  # Dynamo sets capturable in groups that change
        group["lr"] = group["lr"] * 0.9
    optimizer.zero_grad(set_to_none=False)
    (model(inputs(step)) - targets(step)).square().mean().backward()
    optimizer.step()


def gives_a_closure(model: nn.Module, optimizer: Any, step: int) -> None:
    def closure() -> Any:
        optimizer.zero_grad()
        loss = (model(inputs(step)) - targets(step)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


@pytest.mark.parametrize(
    ("body", "given"),
    [(clips_itself, {}), (schedules, {"delivery": "on_demand"}), (gives_a_closure, {}), (schedules, None)],
)
def test_a_function_that_does_a_whole_step_is_compiled(body: Any, given: dict[str, Any] | None) -> None:
    def trained(run: Any) -> list[torch.Tensor]:
        model = model_of()
        if given is None:
            optimizer: Any = CPUAdamW(model.parameters(), lr=3e-3)
        else:
            optimizer = AdamW(model.parameters(), lr=3e-3, max_grad_norm=2.0, module=model, threads=1, **given)
        with closing(optimizer):
            for step in range(4):
                run(model, optimizer, step)
        return [param.detach() for param in model.parameters()]

    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Dynamo")  # it warns of what it cannot trace
        compiled = trained(torch.compile(body, backend="eager"))
    assert all(map(torch.equal, compiled, trained(body)))


def test_a_torch_that_cannot_leave_code_out_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch._dynamo.trace_rules.add")
    keep_from_compiler.__wrapped__()
