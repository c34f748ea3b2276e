"""superoffload.AdamW computes what torch.optim.AdamW computes, and speculation never changes a bit of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy.typing as npt
import pytest
import torch
from torch import nn

from superoffload import AdamW
from superoffload.engine.schedule import Schedule
from superoffload.errors import StateError
from tests.support.adamw_training import (
    TorchAdamW,
    assert_close_to_torch,
    batch,
    check_counters,
    model_of,
    train,
)
from tests.support.fake_cuda import on_host
from tests.support.reference.trainer import Group, Parameter, Trainer

SHAPES: list[tuple[int, ...]] = [(40, 30), (30,), (7, 5, 3), (1,), ()]
CLIP = 4.0  # the recorded gradients have norms around this


def recorded(step: int, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[torch.Tensor]:
    """Gradients like in training: a slow direction plus noise, some elements far smaller than others."""
    generator = torch.Generator().manual_seed(step)
    slow = torch.Generator().manual_seed(step // 20)
    gradients = []
    for shape in shapes:
        size = 10.0 ** (-4 * torch.rand(shape, generator=torch.Generator().manual_seed(1)))
        noise = torch.randn(shape, generator=generator) + torch.randn(shape, generator=slow)
        gradients.append(0.2 * size * noise * (1 + 5 * (step % 17 == 0)))
    return gradients


def parameters(shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(0.1 * torch.randn(shape, generator=generator)) for shape in shapes]


def feed(params: list[nn.Parameter], gradients: list[torch.Tensor]) -> None:
    """Through autograd, so that hooks run: the gradient of sum(p g) is g."""
    for param in params:
        param.grad = None
    torch.stack([(p * g).sum() for p, g in zip(params, gradients, strict=True)]).sum().backward()
    for param, gradient in zip(params, gradients, strict=True):
        assert param.grad is not None
        assert torch.equal(param.grad, gradient)


@pytest.mark.parametrize(("mode", "weight_decay"), [("always", 0.1), ("never", 0.0)])
def test_200_steps_of_recorded_gradients_against_torch(mode: str, weight_decay: float) -> None:
    ours, theirs = parameters(), parameters()
    options: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": weight_decay, "max_grad_norm": CLIP}
    reference = TorchAdamW(theirs, **options)
    lr_so_far = 0.0
    clips = 0
    with AdamW(ours, speculation=mode, bucket_numel=1024, **options) as optimizer:
        for step in range(200):
            for group in (optimizer.param_groups[0], reference.param_groups[0]):
                group["lr"] = 1e-3 * (1 + math.cos(math.pi * step / 200)) / 2
            lr_so_far += optimizer.param_groups[0]["lr"]
            for params in (ours, theirs):
                feed(params, recorded(step))
            optimizer.step()
            reference.step()
            clips += optimizer.last_verdict is not None and optimizer.last_verdict.clip_coefficient < 1
            for mine, their in zip(ours, theirs, strict=True):
                assert_close_to_torch(mine.detach(), their.detach(), lr_so_far)
        assert 10 < clips < 190
        stats = optimizer.stats()
        assert stats["clip_rate"] == clips / 200
        assert mode == "never" or (stats["buckets_committed"] > 0 and stats["buckets_replayed"] > 0)
        for mine, their in zip(ours, theirs, strict=True):
            torch.testing.assert_close(optimizer.state[mine]["exp_avg"], reference.state[their]["exp_avg"])
            torch.testing.assert_close(optimizer.state[mine]["exp_avg_sq"], reference.state[their]["exp_avg_sq"])
            assert optimizer.state[mine]["step"] == reference.state[their]["step"] == 200


def to_numpy(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """A flat copy whose dtype names the format as the reference has it: uint16 is bf16."""
    flat = tensor.detach().reshape(-1).clone()
    found: npt.NDArray[Any] = (flat.view(torch.uint16) if flat.dtype is torch.bfloat16 else flat).numpy()
    return found


@pytest.mark.parametrize(
    ("dtype", "mode", "share", "options"),
    [
        (torch.float32, "never", 0.0, {}),
        (torch.bfloat16, "always", 0.0, {"master_dtype": "split"}),
        (torch.float16, "adaptive", 0.0, {}),
        (torch.float16, "always", 1.0, {}),
        (torch.bfloat16, "never", 0.5, {"master_dtype": "split"}),
    ],
)
def test_whole_runs_have_the_references_bits(
    dtype: torch.dtype, mode: str, share: float, options: dict[str, Any]
) -> None:
    """Hooks, buckets of several chunks, groups and clipping together, against the plain NumPy optimizer. ``share``: how
    much of what is not speculated is published first and settled later."""
    published = "split" if options else {torch.float32: "fp32", torch.float16: "fp16"}[dtype]
    shapes, clip = [*SHAPES, (300, 400)], 24.0
    params = [nn.Parameter(p.detach().to(dtype)) for p in parameters(shapes)]
    split = [params[:2], params[2:]]
    hypers: list[dict[str, Any]] = [{"lr": 1e-2, "weight_decay": 0.0}, {"lr": 1e-3, "weight_decay": 0.1}]
    masters = [[Parameter(to_numpy(p.float()), published) for p in group] for group in split]
    reference = Trainer([Group(m, **o) for m, o in zip(masters, hypers, strict=True)], clip)
    groups = [{"params": group, **o} for group, o in zip(split, hypers, strict=True)]
    given: dict[str, Any] = {"max_grad_norm": clip, "bucket_numel": 1 << 17, "threads": 3, **options}
    with (
        on_host(),
        mock.patch.object(Schedule, "share_to_publish", lambda *_: share),
        AdamW(groups, speculation=mode, **given) as optimizer,
    ):
        for step in range(25):
            gradients = [g.to(dtype) for g in recorded(step, shapes)]
            if step == 11:
                gradients[2].view(-1)[5] = math.inf
            for param, gradient in zip(params, gradients, strict=True):
                param.grad = None
                if not (step % 5 == 1 and param.dim() == 0):  # sometimes without a gradient
                    (param * gradient).sum().backward()
            reference.step([None if p.grad is None else to_numpy(p.grad) for p in params])
            optimizer.step()
            if step % 2:  # in between there may be masters to settle
                assert optimizer.state_digests() == reference.digests()
                assert [float(optimizer.state[p]["step"]) for p in params] == [p.step for p in reference.parameters]
        check_counters(optimizer)
        stats = optimizer.stats()
        assert stats["skipped_steps"] == 1 and 0 < stats["clipped_steps"] < 24
        assert (stats["buckets_two_phase"] > 0) == (share > 0)


@pytest.mark.over_stand_in
def test_step_without_any_gradient_does_nothing() -> None:
    model = model_of()
    with AdamW(model.parameters()) as optimizer:
        before = optimizer.state_digests()
        optimizer.step()
        assert optimizer.state_digests() == before
        assert optimizer.stats()["steps"] == 0
        assert optimizer.last_verdict is None
        with pytest.raises(StateError, match="grad_norm"):
            _ = optimizer.grad_norm
        train(model, optimizer, range(1))
        assert optimizer.stats()["steps"] == 1 and optimizer.state_digests() != before


def test_grad_norm_is_that_before_clipping() -> None:
    model = model_of()
    with AdamW(model.parameters(), max_grad_norm=0.01) as optimizer:
        batch(model, 0).backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        norm = float(torch.cat([g.double().view(-1) for g in grads]).norm())
        assert optimizer.grad_norm == pytest.approx(norm, rel=1e-12)
        assert optimizer.last_verdict is not None
        assert optimizer.last_verdict.clip_coefficient == pytest.approx(0.01 / (norm + 1e-6), rel=1e-12)
        assert optimizer.stats()["clip_rate"] == 1.0
        for param, grad in zip(model.parameters(), grads, strict=True):
            assert param.grad is not None
            assert torch.equal(param.grad, grad), "gradients stay as backward left them"


def test_its_text_has_our_settings_as_they_are_now() -> None:
    with AdamW([nn.Parameter(torch.zeros(3))], max_grad_norm=1.0, speculation="never", state_dtype="bf16") as optimizer:
        optimizer.max_grad_norm = 0.5
        lines = [line.strip() for line in repr(optimizer).splitlines()]
    assert {"max_grad_norm: 0.5", "speculation: never", "state_dtype: torch.bfloat16", "lr: 0.001"} <= set(lines)
