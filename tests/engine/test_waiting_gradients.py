"""Gradients that wait until their bucket is complete: whatever comes between, each is stepped once, as it is then."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW
from superoffload.errors import ArgumentError
from superoffload.optimizer import intake
from superoffload.optimizer.tracked_param import ready_gradients
from tests.support.fake_cuda import on_host

SIZES = (100, 100, 100, 100)


class SparseGradient(torch.autograd.Function):
    """The sum of a vector, with a gradient that cannot be packed."""

    @staticmethod
    def forward(ctx: Any, vector: Tensor) -> Tensor:
        ctx.save_for_backward(vector)
        return vector.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (vector,) = ctx.saved_tensors
        return torch.ones_like(vector).to_sparse()


def made(sizes: Sequence[int] = SIZES, **options: Any) -> tuple[list[nn.Parameter], AdamW]:
    """After two steps: the order of backward is known."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(size)) for size in sizes]
    with on_host():
        optimizer = AdamW(params, lr=0.1, threads=1, **{"speculation": "never", "bucket_numel": 1 << 16, **options})
    for _ in range(2):
        backward(params)
        optimizer.step()
        optimizer.zero_grad()
    return params, optimizer


def backward(params: Iterable[Tensor], scale: float = 1.0) -> None:
    torch.stack([scale * param.sum() for param in params]).sum().backward()


def expect_used(before: Tensor, now: Tensor, gradient: float) -> None:
    """Of first moments: a step has used this."""
    torch.testing.assert_close((now - 0.9 * before) / 0.1, torch.full_like(now, gradient))


def test_another_thread_adds_to_a_gradient_between_its_count_and_its_hand_over() -> None:
    params, optimizer = made()
    raced: list[bool] = []

    def beside(*args: Any) -> Any:
        if not raced:
            raced.append(True)
            thread = threading.Thread(target=lambda: backward([params[1]]))
            thread.start()
            thread.join()
        return ready_gradients(*args)

    before = optimizer.state[params[1]]["exp_avg"].clone()
    with mock.patch.object(intake, "ready_gradients", beside):
        backward(params)
    assert raced and params[1].grad is not None and torch.all(params[1].grad == 2)
    optimizer.step()
    expect_used(before, optimizer.state[params[1]]["exp_avg"], 2.0)
    optimizer.close()


def test_buckets_are_laid_out_anew_while_gradients_wait() -> None:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(100).bfloat16()) for _ in range(5)]
    *several, late = params
    with on_host(), AdamW(params, lr=0.1, speculation="never", threads=1, bucket_numel=1 << 16) as optimizer:
        for _ in range(2):
            backward(several)
            optimizer.step()
            optimizer.zero_grad()
        backward(several)
        as_megatron_does: Any = late
        as_megatron_does.main_grad = torch.ones(100)
        as_megatron_does.grad_added_to_main_grad = True
        backward([late])
        before = [optimizer.state[param]["exp_avg"].clone() for param in several]
        backward(several)
        optimizer.step()
        for param, moment in zip(several, before, strict=True):
            expect_used(moment, optimizer.state[param]["exp_avg"], 2.0)
        assert [int(optimizer.state[param]["step"]) for param in params] == [3, 3, 3, 3, 1]


@pytest.mark.parametrize("other", [lambda grad: grad.half(), lambda grad: torch.empty(0)], ids=["half", "empty"])
def test_memory_that_is_put_into_a_gradient_that_was_handed_over(other: Any) -> None:
    """Packing reads the gradient's own memory and no more; the step goes by what is there, or says what is wrong."""
    params, optimizer = made((30_000,) * 4, bucket_numel=1 << 20)
    backward(params[1:], 3.0)  # the bucket is not complete
    optimizer.synchronize()
    assert params[2].grad is not None
    params[2].grad.data = other(params[2].grad)
    digests = optimizer.state_digests()
    before = optimizer.state[params[2]]["exp_avg"].clone()
    try:
        optimizer.step()
    except ArgumentError as error:
        assert "gradient of" in str(error) and optimizer.state_digests() == digests
    else:
        expect_used(before, optimizer.state[params[2]]["exp_avg"], 3.0)
    optimizer.close()


def test_the_error_of_a_gradient_that_waited_names_it_and_takes_the_users_answer() -> None:
    params, optimizer = made()
    params[3].sum().backward()
    SparseGradient.apply(params[1]).backward()
    optimizer.state_dict()  # of the last finished step: not of this gradient
    params[2].sum().backward()
    with pytest.raises(ArgumentError, match=r"params'\]\[1\].*sparse"):
        params[0].sum().backward()
    params[1].grad = torch.ones(100)
    optimizer.step()
    assert [int(optimizer.state[param]["step"]) for param in params] == [3] * 4
    optimizer.close()
