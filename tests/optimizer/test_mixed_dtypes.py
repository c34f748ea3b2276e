"""Parameters of several dtypes, and masters that keep the bits of a model that was loaded as float32."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW
from superoffload.engine.schedule import MODES
from tests.support.adamw_training import Mixed, batch, model_of


class Masters:
    """torch.optim.AdamW over fp32 copies; gradients copied up, parameters rounded down: what we promise to equal."""

    def __init__(self, params: list[nn.Parameter], masters: list[Tensor] | None = None, **options: Any) -> None:
        self.params = params
        self.masters = [m.detach().float().clone() for m in masters or params]
        self.inner = torch.optim.AdamW(self.masters, **options)

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for master, param in zip(self.masters, self.params, strict=True):
            master.grad = None if param.grad is None else param.grad.float()
        self.inner.step()
        for master, param in zip(self.masters, self.params, strict=True):
            param.copy_(master)


def mixed_step(model: nn.Module, optimizer: Any, seed: int) -> None:
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(8, 16, generator=generator), torch.randn(8, 4, generator=generator)
    (model(x) - y).square().mean().backward()
    optimizer.step()


@pytest.mark.over_stand_in
def test_mixed_dtypes() -> None:
    digests = []
    for mode in MODES:
        model = Mixed()
        with AdamW(model.parameters(), speculation=mode, threads=1) as optimizer:
            for seed in range(6):
                mixed_step(model, optimizer, seed)
            digests.append(optimizer.state_digests())
            masters = [optimizer.state[p]["master"].clone() for p in model.parameters()]
    assert digests[0] == digests[1] == digests[2]
    theirs = Mixed()
    reference = Masters(list(theirs.parameters()))
    for seed in range(6):
        mixed_step(theirs, reference, seed)
    for ours, other in zip(masters, reference.masters, strict=True):
        torch.testing.assert_close(ours, other, rtol=0, atol=1e-4)  # a wrong step is off by 1e-3


@pytest.mark.over_stand_in
@pytest.mark.parametrize("keep", ["by name", "by names of the groups", "in order"])
def test_masters_keep_the_float32_bits(keep: str) -> None:
    model = model_of()
    values = {name: param.detach().clone() for name, param in model.named_parameters()}
    model.bfloat16()
    named: Any = model.named_parameters() if keep == "by names of the groups" else model.parameters()
    with AdamW(named, model=model if keep == "by name" else None, threads=1) as optimizer:
        prefixed = {f"module.{name}": value for name, value in values.items()}
        optimizer.load_masters(list(values.values()) if keep == "in order" else prefixed)
        for param, value in zip(model.parameters(), values.values(), strict=True):
            assert torch.equal(optimizer.state[param]["master"], value)
        assert not torch.equal(next(model.parameters()).float(), values["0.weight"]), "they are more precise"
        theirs = copy.deepcopy(model)
        reference = Masters(list(theirs.parameters()), list(values.values()))
        for a_model, an_optimizer in ((model, optimizer), (theirs, reference)):
            for seed in range(5):
                an_optimizer.zero_grad()
                batch(a_model, seed).float().backward()
                an_optimizer.step()
        for param, other in zip(model.parameters(), reference.masters, strict=True):
            torch.testing.assert_close(optimizer.state[param]["master"], other, rtol=0, atol=1e-4)


BAD_MASTERS: dict[str, tuple[Callable[[list[Tensor]], Any], str]] = {
    "other values": (lambda values: [values[0] + 1.0, *values[1:]], "is not their rounding"),
    "too few": (lambda values: values[1:], "5 tensors, expected 6"),
    "a missing name": (lambda values: {"what": values[0]}, "no value for '0.weight'"),
    "another shape": (lambda values: [values[0].t(), *values[1:]], "expected a tensor of shape (48, 16)"),
    "not finite": (lambda values: [values[0] * torch.inf, *values[1:]], "NaN or infinite"),
    "no tensors": (lambda values: 3, "expected a mapping of names to tensors"),
}


def test_masters_that_do_not_fit_are_refused() -> None:
    model = model_of()
    values = [p.detach().clone() for p in model.parameters()]
    model.bfloat16()
    with AdamW(model.parameters(), model=model, threads=1) as optimizer:
        before = optimizer.state_digests()
        for change, words in BAD_MASTERS.values():
            with pytest.raises(ValueError, match=re.escape(words)):
                optimizer.load_masters(change(values))
            assert optimizer.state_digests() == before
