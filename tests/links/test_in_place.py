"""Parameters on the CPU that are never stepped early: gradients are read and parameters written where they are."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW
from superoffload.errors import ArgumentError
from tests.support.adamw_training import batch, model_of


@pytest.mark.parametrize(
    ("form", "expected"),  # bytes per bf16 parameter, without scales
    [
        ({}, 12.0),
        ({"state_dtype": "8bit"}, 6.0),
        ({"master_dtype": "split"}, 12.0),  # the upper halves stay apart from the parameter
        ({"master_dtype": "split", "state_dtype": "8bit"}, 6.0),
    ],
)
def test_nothing_is_kept_twice(form: dict[str, Any], expected: float) -> None:
    numel = 1 << 20
    param = nn.Parameter(torch.zeros(numel, dtype=torch.bfloat16))
    with AdamW([param], speculation="never", **form) as optimizer:
        values = np.zeros(numel, np.int16)
        param.grad = torch.from_numpy(values).view(torch.bfloat16)
        memory = weakref.ref(values)
        del values
        optimizer.step()
        stats = optimizer.stats()
        assert stats["host_bytes"] / numel == pytest.approx(expected, abs=0.03)
        assert (stats["bytes_down"], stats["bytes_up"]) == (0, 0 if "master_dtype" not in form else 2 * numel)
        assert stats["journal_reserved_bytes"] == 0
        optimizer.zero_grad()
        gc.collect()
        assert memory() is None, "the gradient outlives the step"


def check_against_speculation(
    train: Callable[[Any, AdamW], None], make: Callable[[], Any] = model_of, **options: Any
) -> None:
    """The bits are those of the host link."""
    digests = []
    for mode in ("never", "always"):
        model = make()
        params = model.parameters() if isinstance(model, nn.Module) else model
        with AdamW(params, speculation=mode, **{"lr": 1e-2, "bucket_numel": 512, **options}) as optimizer:
            train(model, optimizer)
            digests.append(optimizer.state_digests())
    assert digests[0] == digests[1]


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": lambda grad: grad.mean().expand(grad.shape),
    "transposed": lambda grad: grad.t().contiguous().t() if grad.dim() == 2 else grad.flip(0).flip(0),
}


def test_gradients_of_any_form_as_they_are_at_the_step() -> None:
    def steps(model: nn.Module, optimizer: AdamW) -> None:
        for step, form in enumerate((*FORMS.values(), *FORMS.values())):
            optimizer.zero_grad()
            batch(model, step).backward()
            for param in model.parameters():
                assert param.grad is not None
                param.grad = form(param.grad)
            optimizer.step()

    check_against_speculation(steps, max_grad_norm=0.5)


@pytest.mark.parametrize("of", ["parameter", "parameter that moved", "moment", "memory of numpy"])
def test_gradients_that_are_memory_which_the_step_writes(of: str) -> None:
    memory = np.zeros(5000, dtype=np.float32)

    def make() -> list[Any]:
        memory[:] = np.linspace(0, 1, 5000)
        first = torch.from_numpy(memory[500:3500]) if of == "memory of numpy" else torch.linspace(0, 1, 3000)
        values = (first, *(torch.linspace(0, step + 1, 3000) for step in (1, 2)))
        return [{"params": [nn.Parameter(one)]} for one in values]

    def steps(made: list[Any], optimizer: AdamW) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for _ in range(4):
            for param, other in zip(params, [*params[1:], params[0]], strict=True):
                if of == "parameter that moved":
                    other.data = other.detach().clone()
                state = optimizer.state.get(other)
                param.grad = state["exp_avg"] if of == "moment" and state else other.detach()
            params[-1].grad = torch.ones_like(params[-1])
            if of == "memory of numpy":
                params[0].grad = torch.from_numpy(memory[:3000])
            optimizer.step()

    check_against_speculation(steps, make, lr=0.1, bucket_numel=1024, threads=2)


@pytest.mark.parametrize("change", ["move", "edit unseen"])
def test_a_step_that_failed_leaves_nothing_to_the_next(change: str) -> None:
    """Memory is looked up in every step, and gradients are as they are then."""
    digests = []
    for fails in (True, False):
        params = [nn.Parameter(torch.linspace(0, step + 1, 3000)) for step in range(3)]
        with AdamW(params, speculation="never", lr=0.1, bucket_numel=1024, max_grad_norm=1.0) as optimizer:
            for _ in range(2):
                for param in params:
                    param.grad = torch.ones_like(param)
                if fails:
                    params[-1].grad = torch.ones(3000).to_sparse()
                    with pytest.raises(ArgumentError, match="sparse"):
                        optimizer.step()
                    params[-1].grad = torch.ones_like(params[-1])
                if change == "move":
                    for param in params:
                        param.data = param.detach().clone()
                else:
                    grad: Any = params[0].grad
                    grad.data.fill_(0.25)
                optimizer.step()
                for param in params:
                    assert torch.equal(param.detach(), optimizer.state[param]["master"])
            digests.append(optimizer.state_digests())
    assert digests[0] == digests[1]
