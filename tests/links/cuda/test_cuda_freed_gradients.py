"""Gradients are freed once they are packed: what stands for them, for how long. Kept ones may be edited."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW
from superoffload.errors import ArgumentError, DeviceError, StateError
from superoffload.optimizer.packed_gradient import PackedGradient
from tests.support.adamw_training import batch, model_of, train
from tests.support.fake_cuda import Fake, on_fake_device
from tests.support.fake_cuda_training import check_against_host, host_digests, training


def test_what_stands_in_for_a_gradient_goes_with_zero_grad(fake: Fake) -> None:
    with training(fake) as (model, optimizer):
        for set_to_none in (True, False):
            optimizer.zero_grad()
            batch(model, 2).backward()
            assert "packed and freed" in repr(next(model.parameters()).grad)
            optimizer.zero_grad(set_to_none)
            assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())
        fake.synchronize()
        assert optimizer.state_digests() == host_digests(range(2)), "steps that were never taken"


@pytest.mark.parametrize("way", ["another gradient", "no optimizer", "closed"])
def test_one_that_is_kept_for_longer_is_an_error_and_never_another_gradient(fake: Fake, way: str) -> None:
    with training(fake) as (model, optimizer):
        optimizer.zero_grad()
        batch(model, 2).backward()
        kept = [parameter.grad for parameter in model.parameters()]
        looked_at = kept.pop()
        assert isinstance(looked_at, PackedGradient)
        values = looked_at.clone()
        optimizer.step()
        if way == "another gradient":
            optimizer.zero_grad()
            batch(model, 3).backward()
        elif way == "closed":
            optimizer.close()
        else:
            optimizer._parts.params.forget_all()
        for grad in kept:
            assert isinstance(grad, PackedGradient)
            with pytest.raises(StateError, match=r"packed and freed.*later one.*clone\(\).*keep_grads=True"):
                grad.norm()
        assert torch.equal(looked_at, values)


def test_one_of_a_step_before_is_gone_once_a_part_of_the_next_is_packed(fake: Fake) -> None:
    """A large gradient's first buckets are packed while its last one waits for others."""
    with on_fake_device(fake):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 20), nn.Tanh(), nn.Linear(20, 80), nn.Linear(80, 4)).to(torch.bfloat16)
        model.register_forward_pre_hook(lambda *_: fake.synchronize())
        weight: Any = model[2].weight
        kept: list[Any] = []
        errors: list[str] = []

        def look(_: Tensor) -> None:
            if kept:
                with pytest.raises(StateError, match="made way for a later one") as caught:
                    kept[0].norm()
                errors.append(str(caught.value))

        with AdamW(model.parameters(), threads=1, bucket_numel=1024) as optimizer:
            train(model, optimizer, range(2))
            hook = weight.register_post_accumulate_grad_hook(look)
            kept.append(weight.grad)
            optimizer.zero_grad()
            batch(model, 2).backward()
            hook.remove()
        assert len(errors) == 1


def test_no_room_to_bring_one_back(fake: Fake) -> None:
    """Nothing is lost: the step is taken all the same."""

    def unread(model: nn.Module, optimizer: AdamW) -> None:
        optimizer.zero_grad()
        batch(model, 2).backward()
        grad = next(model.parameters()).grad
        if isinstance(grad, PackedGradient):
            refused = mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory, as a test has asked for"))
            with mock.patch("torch.empty", refused), pytest.raises(DeviceError, match=r"no room.*micro-batches"):
                grad.norm()
        optimizer.step()

    check_against_host(fake, unread)


def test_a_gradient_that_was_lost_on_its_way_is_an_error(fake: Fake) -> None:
    with training(fake) as (model, optimizer):
        optimizer.zero_grad()
        batch(model, 2).backward()
        fake.synchronize()
        grad = next(model.parameters()).grad
        assert isinstance(grad, PackedGradient)
        lost = mock.Mock()
        lost.wait.side_effect = RuntimeError("the copy has failed")
        for bucket in optimizer._engine.buckets:
            bucket.packed = lost
        with pytest.raises(DeviceError, match="the copy has failed"):
            grad.norm()
        optimizer.step()


def test_a_gradient_that_is_taken_away_is_not_stepped(fake: Fake) -> None:
    def without_first(model: nn.Module, optimizer: AdamW) -> None:
        optimizer.zero_grad()
        batch(model, 2).backward()
        next(model.parameters()).grad = None
        optimizer.step()

    check_against_host(fake, without_first)


def test_model_zero_grad_and_another_backward(fake: Fake) -> None:
    """The first backward's gradients are gone: only the second counts."""
    with training(fake) as (model, optimizer):
        batch_of_another_step = 7
        model.zero_grad()
        batch(model, batch_of_another_step).backward()
        model.zero_grad()
        batch(model, 2).backward()
        optimizer.step()
        fake.synchronize()
        assert optimizer.state_digests() == host_digests(range(3))


def test_accumulated_gradients(fake: Fake) -> None:
    def window(model: nn.Module, optimizer: AdamW) -> None:
        optimizer.zero_grad()
        with optimizer.accumulate():
            batch(model, 10).backward()
        batch(model, 11).backward()
        optimizer.step()

    check_against_host(fake, window)


def test_kept_gradients_may_be_edited(fake: Fake) -> None:
    def edited(model: nn.Module, optimizer: AdamW) -> None:
        optimizer.zero_grad()
        batch(model, 2).backward()
        fake.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()

    check_against_host(fake, edited, keep_grads=True)


@pytest.mark.parametrize("value", [0, "no", 1.5])
def test_keep_grads_is_checked(value: Any) -> None:
    with pytest.raises(ArgumentError, match="keep_grads"):
        AdamW(model_of().parameters(), keep_grads=value)
