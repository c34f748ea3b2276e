"""superoffload.AdamW computes what torch.optim.AdamW computes, and speculation never changes a bit of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from superoffload import AdamW
from superoffload.errors import StateError
from superoffload.schedule import MODES
from tests.support.adamw_training import (
    DTYPES,
    Optimizer,
    TorchAdamW,
    assert_close_to_torch,
    assert_trained_alike,
    batch,
    check_counters,
    check_scenario,
    model_of,
    run_ours,
    train,
)
from tests.support.compatibility import compat
from tests.support.engine_rig import to_numpy
from tests.support.reference.trainer import Group, Parameter, Trainer

SHAPES = [(40, 30), (30,), (7, 5, 3), (1,), ()]
CLIP = 4.0  # the recorded gradients have norms around this


def recorded(step: int) -> list[torch.Tensor]:
    """Gradients like in training: a slow direction plus noise, some elements far smaller than others."""
    generator = torch.Generator().manual_seed(step)
    slow = torch.Generator().manual_seed(step // 20)
    gradients = []
    for shape in SHAPES:
        size = 10.0 ** (-4 * torch.rand(shape, generator=torch.Generator().manual_seed(1)))
        noise = torch.randn(shape, generator=generator) + torch.randn(shape, generator=slow)
        gradients.append(0.2 * size * noise * (1 + 5 * (step % 17 == 0)))
    return gradients


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(0.1 * torch.randn(shape, generator=generator)) for shape in SHAPES]


def feed(params: list[nn.Parameter], gradients: list[torch.Tensor]) -> None:
    """Through autograd, so that hooks run: the gradient of sum(p g) is g."""
    for param in params:
        param.grad = None
    torch.stack([(p * g).sum() for p, g in zip(params, gradients, strict=True)]).sum().backward()
    for param, gradient in zip(params, gradients, strict=True):
        assert param.grad is not None
        assert torch.equal(param.grad, gradient)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
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
        if mode == "always":
            assert stats["buckets_committed"] > 0
            assert stats["buckets_replayed"] > 0
        for mine, their in zip(ours, theirs, strict=True):
            torch.testing.assert_close(optimizer.state[mine]["exp_avg"], reference.state[their]["exp_avg"])
            torch.testing.assert_close(optimizer.state[mine]["exp_avg_sq"], reference.state[their]["exp_avg_sq"])
            assert optimizer.state[mine]["step"] == reference.state[their]["step"] == 200


@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_runs_have_the_references_bits(dtype: torch.dtype) -> None:
    """Hooks, buckets, groups and clipping together, against the plain NumPy optimizer."""
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    params = [nn.Parameter(p.detach().to(dtype)) for p in parameters()]
    split = [params[:2], params[2:]]
    options: list[dict[str, Any]] = [{"lr": 1e-2, "weight_decay": 0.0}, {"lr": 1e-3, "weight_decay": 0.1}]
    masters = [[Parameter(to_numpy(p.float()), names[dtype]) for p in group] for group in split]
    reference = Trainer([Group(m, **o) for m, o in zip(masters, options, strict=True)], CLIP)
    groups = [{"params": group, **o} for group, o in zip(split, options, strict=True)]
    with AdamW(groups, speculation="always", max_grad_norm=CLIP, bucket_numel=1024, threads=2) as optimizer:
        for step in range(25):
            gradients = [g.to(dtype) for g in recorded(step)]
            if step == 11:
                gradients[2].view(-1)[5] = math.inf
            for param, gradient in zip(params, gradients, strict=True):
                param.grad = None
                if not (step % 5 == 1 and param.dim() == 0):  # sometimes without a gradient
                    (param * gradient).sum().backward()
            reference.step([None if p.grad is None else to_numpy(p.grad) for p in params])
            optimizer.step()
            assert optimizer.state_digests() == reference.digests()
            assert [float(optimizer.state[p]["step"]) for p in params] == [p.step for p in reference.parameters]
        check_counters(optimizer)
        assert optimizer.stats()["skipped_steps"] == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bucket_numel", [None, 1024])
def test_training_is_the_same_in_every_mode(dtype: torch.dtype, bucket_numel: int | None) -> None:
    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        for seed in range(12):
            optimizer.zero_grad()
            batch(model, seed, scale=10.0 if seed == 6 else 1.0).backward()
            if seed == 8:
                next(model.parameters()).grad.view(-1)[0] = math.nan  # type: ignore[union-attr]
            optimizer.step()

    stats = check_scenario(scenario, dtype, bucket_numel=bucket_numel, max_grad_norm=3.0)
    assert stats["buckets_committed"] > 0
    assert stats["buckets_replayed"] > 0 or bucket_numel is None  # one bucket: its own norm proves the clip
    assert stats["skipped_steps"] == 1


def test_a_published_parameter_is_the_rounded_master() -> None:
    model, optimizer = run_ours(lambda m, o: train(m, o, range(5)), "always", torch.bfloat16)
    for param in model.parameters():
        master = optimizer.state[param]["master"]
        assert torch.equal(param.detach(), master.to(torch.bfloat16))
        assert not torch.equal(param.detach().float(), master)


@pytest.mark.parametrize("scheduler", ["cosine", "one_cycle", "lambda"])
def test_schedulers(scheduler: str) -> None:
    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        lr_scheduler: Any
        if scheduler == "cosine":
            lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        elif scheduler == "one_cycle":  # changes betas too
            lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=10)
        else:
            lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        for seed in range(8):
            optimizer.zero_grad()
            batch(model, seed).backward()
            optimizer.step()
            lr_scheduler.step()

    assert check_scenario(scenario)["buckets_committed"] > 0


def test_a_scheduler_between_backward_and_step() -> None:
    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        for seed in range(6):
            optimizer.zero_grad()
            batch(model, seed).backward()
            optimizer.param_groups[0]["lr"] = 1e-3 / (seed + 1)
            optimizer.step()

    stats = check_scenario(scenario, lr=1e-3)
    assert stats["buckets_undone"] == 5
    assert stats["buckets_committed"] == 1


@pytest.mark.parametrize("changed", [{"betas": (0.8, 0.99)}, {"eps": 1e-3}, {"weight_decay": 0.3}, {"lr": 0.0}])
def test_hyper_parameters_changed_after_backward(changed: dict[str, Any]) -> None:
    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        train(model, optimizer, range(3))
        optimizer.zero_grad()
        batch(model, 7).backward()
        optimizer.param_groups[0].update(changed)
        optimizer.step()
        train(model, optimizer, range(3))

    assert check_scenario(scenario)["buckets_undone"] == 1


@pytest.mark.parametrize(("before", "after"), [(None, 0.1), (0.1, None), (1e6, 0.1)])
def test_max_grad_norm_changed_after_backward(before: float | None, after: float | None) -> None:
    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        train(model, optimizer, range(3))
        for seed in range(3):
            optimizer.max_grad_norm = before
            optimizer.zero_grad()
            batch(model, seed).backward()
            optimizer.max_grad_norm = after
            optimizer.step()

    check_scenario(scenario)


def test_groups_with_their_own_hyper_parameters() -> None:
    def groups(model: nn.Sequential) -> list[dict[str, Any]]:
        decayed = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() <= 1]
        return [
            {"params": decayed, "weight_decay": 0.3, "lr": 1e-2},
            {"params": rest, "weight_decay": 0.0, "betas": (0.8, 0.9)},
        ]

    models = [model_of() for _ in range(3)]
    torchs = TorchAdamW(groups(models[0]), max_grad_norm=0.5)
    train(models[0], torchs, range(6))
    digests = []
    for model, mode in zip(models[1:], ("always", "never"), strict=True):
        with AdamW(groups(model), speculation=mode, max_grad_norm=0.5) as optimizer:
            train(model, optimizer, range(6))
            digests.append(optimizer.state_digests())
            assert_trained_alike(model, models[0])
    assert digests[0] == digests[1]


@compat("add_param_group at any time", "single", "stand_in")
@pytest.mark.parametrize("in_flight", [False, True])
def test_add_param_group_in_the_middle_of_a_run(in_flight: bool) -> None:
    """In flight: between backward and step(); the new parameters already have gradients."""

    def run(model: nn.Sequential, optimizer: Any) -> None:
        train(model, optimizer, range(4))
        optimizer.zero_grad()
        if in_flight:
            batch(model, 9).backward()
        optimizer.add_param_group({"params": list(model[3].parameters()), "lr": 5e-3})
        if not in_flight:
            batch(model, 9).backward()
        optimizer.step()
        train(model, optimizer, range(4))

    models = [model_of() for _ in range(3)]
    torchs = TorchAdamW(models[0][:3].parameters())
    run(models[0], torchs)
    digests = []
    for model, mode in zip(models[1:], ("always", "never"), strict=True):
        with AdamW(model[:3].parameters(), speculation=mode) as optimizer:
            for param in model[3].parameters():
                param.grad = None
            run(model, optimizer)
            digests.append(optimizer.state_digests())
            check_counters(optimizer)
            assert_trained_alike(model, models[0])
    assert digests[0] == digests[1]


@compat("parameters frozen and unfrozen mid-run", "single", "stand_in")
def test_frozen_parameters_are_left_alone_and_can_be_unfrozen() -> None:
    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        first, *_ = model.parameters()
        first.requires_grad_(False)
        train(model, optimizer, range(3))
        first.requires_grad_(True)
        train(model, optimizer, range(4))
        first.requires_grad_(False)
        train(model, optimizer, range(2))

    check_scenario(scenario)


def test_a_parameter_frozen_from_the_start_takes_memory_only_when_it_trains() -> None:
    models = [model_of() for _ in range(2)]
    for model in models:
        model[0].requires_grad_(False)
    reference = TorchAdamW(models[0].parameters())
    with AdamW(models[1].parameters(), speculation="always") as optimizer:
        frozen = list(models[1][0].parameters())
        one: Any
        for model, one in zip(models, (reference, optimizer), strict=True):
            train(model, one, range(2))
            model[0].requires_grad_(True)
            assert not any(param in optimizer.state for param in frozen)
            train(model, one, range(3))
        assert [float(optimizer.state[p]["step"]) for p in models[1].parameters()] == [3, 3, 5, 5, 5, 5]
        assert_trained_alike(models[1], models[0])
        before = optimizer.stats()["buckets_committed"]
        train(models[1], optimizer, range(2))
        # Its hook is there by now: all four, the two new ones in buckets of their own.
        assert optimizer.stats()["buckets_committed"] == before + 2 * len(optimizer._core.buckets)


def test_a_gradient_given_to_a_frozen_parameter_is_used_as_in_torch() -> None:
    params = [nn.Parameter(torch.ones(5), requires_grad=False) for _ in range(2)]
    with AdamW([params[0]]) as optimizer:
        for param, one in zip(params, (optimizer, TorchAdamW([params[1]])), strict=True):
            param.grad = torch.arange(5.0)
            one.step()
        assert_close_to_torch(params[0], params[1], 1e-3)
        assert not torch.equal(params[0], torch.ones(5))


@compat("a step with some or no gradients", "single", "stand_in")
def test_parameters_without_gradients_keep_their_own_step_count() -> None:
    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        for seed in range(6):
            optimizer.zero_grad()
            batch(model, seed).backward()
            if seed % 2:
                next(model.parameters()).grad = None
            optimizer.step()

    check_scenario(scenario)


@compat("a step with some or no gradients", "single", "stand_in")
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


def test_step_twice_applies_the_gradients_twice_as_in_torch() -> None:
    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        batch(model, 0).backward()
        optimizer.step()
        optimizer.step()

    check_scenario(scenario)


@compat("closure", "single", "stand_in")
def test_closure() -> None:
    losses = []

    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        for seed in range(4):

            def closure(seed: int = seed) -> float:
                optimizer.zero_grad()
                loss = batch(model, seed)
                loss.backward()
                return loss.item()

            losses.append(optimizer.step(closure))

    check_scenario(scenario)
    assert losses[:4] == losses[4:8] == losses[8:12]
    assert losses[0] == batch(model_of(), 0).item()


@compat("zero-size parameters", "single", "stand_in")
@compat("scalar parameters", "single", "stand_in")
def test_zero_size_and_scalar_parameters() -> None:
    params = [[nn.Parameter(torch.ones(shape)) for shape in [(0,), (3, 0), (), (5,)]] for _ in range(2)]
    with AdamW(params[0], speculation="always") as optimizer:
        for mine, one in zip(params, (optimizer, TorchAdamW(params[1])), strict=True):
            for _ in range(3):
                one.zero_grad()
                torch.stack([p.square().sum() for p in mine]).sum().backward()
                one.step()
        for mine_p, their_p in zip(*params, strict=True):
            assert_close_to_torch(mine_p[None], their_p[None], 3e-3) if mine_p.numel() else None
        assert optimizer.state[params[0][2]]["exp_avg"].shape == ()
        assert [float(optimizer.state[p]["step"]) for p in params[0]] == [3.0] * 4
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.state_digests()


def test_only_an_empty_parameter() -> None:
    param = nn.Parameter(torch.ones(0))
    with AdamW([param]) as optimizer:
        param.sum().backward()
        optimizer.step()
        assert optimizer.stats()["steps"] == 1
        assert optimizer.grad_norm == 0.0


@compat("several optimizers on one model", "single", "stand_in")
def test_two_optimizers_share_a_model() -> None:
    models = [model_of() for _ in range(2)]
    with (
        AdamW(models[0][0].parameters(), lr=1e-2, speculation="always") as first,
        AdamW(models[0][2:].parameters(), lr=1e-3, max_grad_norm=0.1) as second,
    ):
        theirs = [TorchAdamW(models[1][0].parameters(), lr=1e-2)]
        theirs.append(TorchAdamW(models[1][2:].parameters(), lr=1e-3, max_grad_norm=0.1))
        both: Any
        for model, both in zip(models, ([first, second], theirs), strict=True):
            for seed in range(5):
                batch(model, seed).backward()
                for optimizer in both:
                    optimizer.step()
                    optimizer.zero_grad()
        assert_trained_alike(models[0], models[1])


@compat("tied parameters", "single", "stand_in")
def test_a_tied_parameter_is_stepped_once() -> None:
    params = [nn.Parameter(torch.ones(6)) for _ in range(2)]
    with AdamW([params[0]], speculation="always") as optimizer:
        for param, one in zip(params, (optimizer, TorchAdamW([params[1]])), strict=True):
            (param.square().sum() + (3 * param).sum()).backward()  # used twice
            one.step()
        assert_close_to_torch(params[0], params[1], 1e-3)
        assert optimizer.stats()["buckets_committed"] == 1


def test_found_inf_leaves_everything_and_is_counted() -> None:
    model = model_of(torch.bfloat16)
    with AdamW(model.parameters(), speculation="always", bucket_numel=1) as optimizer:
        train(model, optimizer, range(3))
        before, versions = optimizer.state_digests(), [p._version for p in model.parameters()]
        optimizer.zero_grad()
        last = optimizer._core.buckets[-1].pieces[-1].shard.index  # to arrive: the others were speculated before
        list(model.parameters())[last].register_hook(lambda g: g * math.inf)
        batch(model, 5).backward()
        optimizer.step()
        assert optimizer.state_digests() == before
        assert [p._version for p in model.parameters()] == versions
        assert all(float(optimizer.state[p]["step"]) == 3 for p in model.parameters())
        assert optimizer.stats()["steps"] == 3
        assert optimizer.stats()["skipped_steps"] == 1
        assert optimizer.stats()["buckets_skipped"] > 0
        assert optimizer.grad_norm == math.inf
        assert optimizer.last_verdict is not None
        assert optimizer.last_verdict.found_inf
        check_counters(optimizer)


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
