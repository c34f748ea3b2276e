"""Parameters that are frozen, empty, scalar, tied, of several dtypes, shared by optimizers, without a gradient, or not
where they should be."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from superoffload import AdamW, CPUAdamW, checkpoints
from superoffload.errors import ArgumentError, StateError
from tests.support.adamw_training import (
    TorchAdamW,
    assert_close_to_torch,
    batch,
    model_of,
    pair,
    train,
)


def test_frozen_quantized_parameters_are_left_alone(tmp_path: Path) -> None:
    """As bitsandbytes and torchao make them: torch takes them in the list too, since no gradient ever comes."""
    model, other = model_of(torch.bfloat16), model_of(torch.bfloat16)
    dtypes = {"a": torch.uint8, "b": torch.int8, "c": torch.float8_e4m3fn, "d": torch.int64}
    for one in (model, other):
        for name, dtype in dtypes.items():
            quantized = torch.arange(16).to(torch.float32).to(dtype)
            one[0].register_parameter(name, nn.Parameter(quantized, requires_grad=False))
    options: dict[str, Any] = {"delivery": "on_demand", "master_dtype": "split", "state_dtype": "bf16"}
    with (
        AdamW(model.parameters(), module=model, **options) as optimizer,
        AdamW(other.parameters(), module=other, **options) as resumed,
    ):
        train(model, optimizer, range(3))
        checkpoints.save(tmp_path / "saved", model, optimizer)
        checkpoints.load(tmp_path / "saved", other, resumed)
        assert resumed.state_digests() == optimizer.state_digests()
        optimizer.load_state_dict(optimizer.state_dict())
    for name, dtype in dtypes.items():
        expected = torch.arange(16).to(torch.float32).to(dtype)
        assert torch.equal(model.get_parameter(f"0.{name}"), expected), name


def test_a_parameter_of_another_dtype_that_trains_is_refused() -> None:
    for make in (AdamW, CPUAdamW):
        with pytest.raises(ArgumentError, match=r"dtype torch.float64, expected float32, bfloat16"):
            make([nn.Parameter(torch.ones(4).to(torch.float64))])
    quantized = nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn), requires_grad=False)
    param = nn.Parameter(torch.ones(4))
    with AdamW([param, quantized]) as optimizer, closing(CPUAdamW([quantized])) as kernel:
        quantized.requires_grad_(True)
        param.grad, quantized.grad = torch.ones(4), torch.ones(4).to(torch.float8_e4m3fn)
        for one in (optimizer, kernel):
            with pytest.raises(ArgumentError, match=r"dtype torch.float8_e4m3fn, expected float32, bfloat16 or"):
                one.step()
        assert torch.equal(param, torch.ones(4))


@pytest.mark.over_stand_in
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


def _negated_in_memory(values: Tensor) -> Tensor:
    """The same single value, with torch's negative bit set: its memory has the opposite sign."""
    view = torch.complex(torch.zeros(1), -values).conj().imag
    assert view.is_neg() and view.is_contiguous() and torch.equal(view, values)
    return view


@pytest.mark.parametrize(("made", "made_by"), [(AdamW, "autograd"), (AdamW, "user"), (CPUAdamW, "user")])
def test_a_gradient_with_the_negative_bit_keeps_its_sign(made: Any, made_by: str) -> None:
    """The first gradient of a step goes to the engine alone, the others of its bucket together."""
    models = [[nn.Parameter(torch.ones(1)) for _ in range(3)] for _ in range(2)]
    with closing(made(models[0], lr=0.1)) as optimizer:
        for params, one in zip(models, (optimizer, TorchAdamW(models[1], lr=0.1)), strict=True):
            if made_by == "autograd":
                for param in params:
                    param.register_hook(_negated_in_memory)
            for value in (3.0, -1.0, 2.0):
                one.zero_grad()
                if made_by == "autograd":
                    torch.stack([value * param for param in params]).sum().backward()
                else:
                    for param in params:
                        param.grad = _negated_in_memory(torch.tensor([value]))
                one.step()
        for ours, theirs in zip(*models, strict=True):
            assert_close_to_torch(ours, theirs, 1e-6)


@pytest.mark.parametrize(
    ("made", "options", "sizes"),
    [
        (AdamW, {"bucket_numel": 512}, [700]),
        (AdamW, {"bucket_numel": 512, "speculation": "never"}, [300, 300]),
        (CPUAdamW, {}, [300, 300]),
    ],
)
def test_a_gradient_of_zeros_without_memory_is_zero(made: Any, options: dict[str, Any], sizes: list[int]) -> None:
    """As forward-mode derivatives and backwards of custom functions make them."""
    results = []
    for zeros in (torch._efficientzerotensor, torch.zeros):
        params = [nn.Parameter(torch.ones(size)) for size in sizes]
        with closing(made(params, lr=0.1, **options)) as optimizer:
            for step in range(3):
                for param in params:
                    param.grad = torch.ones_like(param)
                if step:
                    params[0].grad = zeros(sizes[0])
                optimizer.step()
        results.append([param.detach().clone() for param in params])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("kind", [AdamW, CPUAdamW])
def test_parameters_that_share_memory_are_refused(kind: Any) -> None:
    memory = torch.zeros(12)
    first = nn.Parameter(memory[:8].view(2, 4))
    for others in (first.detach(), memory[:8], memory[7:], memory[:8].view(torch.bfloat16)):
        second = nn.Parameter(others)
        for params in ([first, second], [second, first], [("a", first), ("b", second)]):
            with pytest.raises(ArgumentError, match=r"shares memory with .*use one of them in both places"):
                kind(params)
        with closing(kind([first])) as optimizer:
            with pytest.raises(ArgumentError, match="shares memory with"):
                optimizer.add_param_group({"params": [second]})
            assert len(optimizer.param_groups) == 1
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    apart = [nn.Parameter(memory[:4]), nn.Parameter(memory[4:].view(2, 4)), nn.Parameter(memory[2:2])]
    kind([*apart, nn.Parameter(memory[:4], requires_grad=False)])  # parts of one flat tensor


@pytest.mark.over_stand_in
@pytest.mark.parametrize("keep", ["by name", "by names of the groups", "in order"])
def test_masters_keep_the_float32_bits(keep: str) -> None:
    """And are what steps begin from."""
    model, twin = model_of(), model_of()
    values = {name: param.detach().clone() for name, param in model.named_parameters()}
    model.bfloat16()
    named: Any = model.named_parameters() if keep == "by names of the groups" else model.parameters()
    with AdamW(named, model=model if keep == "by name" else None, threads=1) as optimizer:
        prefixed = {f"module.{name}": value for name, value in values.items()}
        optimizer.load_masters(list(values.values()) if keep == "in order" else prefixed)
        for param, value in zip(model.parameters(), values.values(), strict=True):
            assert torch.equal(optimizer.state[param]["master"], value)
        assert not torch.equal(next(model.parameters()).float(), values["0.weight"]), "they are more precise"
        stock = torch.optim.AdamW(twin.parameters())
        for seed in range(5):
            optimizer.zero_grad()
            for master, grad in zip(
                twin.parameters(), torch.autograd.grad(batch(model, seed), list(model.parameters())), strict=True
            ):
                master.grad = grad.float()
            batch(model, seed).backward()
            optimizer.step()
            stock.step()
        for param, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert_close_to_torch(optimizer.state[param]["master"], other.detach(), 5e-3)


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


def on_a_gpu() -> nn.Parameter:
    """As far as shapes and devices go."""
    with FakeTensorMode():
        return nn.Parameter(torch.empty(8, device="cuda"))


def test_parameters_on_several_devices_are_refused() -> None:
    message = "on cuda:0, while parameters before it are on cpu; expected one device per optimizer"
    with pytest.raises(ArgumentError, match=message):
        AdamW([nn.Parameter(torch.zeros(8)), on_a_gpu()])
    with pair() as (model, optimizer, twin, plain):
        train(model, optimizer, range(2))
        optimizer.zero_grad()
        batch(model, 2).backward()
        with pytest.raises(ArgumentError, match=message):
            optimizer.add_param_group({"params": [on_a_gpu()]})
        assert len(optimizer.param_groups) == 1
        optimizer.step()
        train(twin, plain, range(3))
        assert optimizer.state_digests() == plain.state_digests()


def moved(model: nn.Module, optimizer: AdamW) -> None:
    """Its device is what we remember of it: there is no other one here."""
    for param in model.parameters():
        optimizer._parts.params[param].device = torch.device("cuda:0")
        param.data = param.data.clone()


def resized(model: nn.Module, _: AdamW) -> None:
    for param in model.parameters():
        param.data, param.grad = torch.zeros(5), torch.zeros(5)


def negated(model: nn.Module, _: AdamW) -> None:
    """Over its own memory, so that no version shows it."""
    last = list(model.parameters())[-1]
    last.data = torch._neg_view(last.data)


@pytest.mark.parametrize(
    ("change", "in_flight", "words", "delivery"),
    [
        (negated, True, "resolve_neg", "eager"),
        (moved, False, "was on cuda:0, now on cpu; make the optimizer after moving the model", "on_demand"),
        (moved, True, "was on cuda:0, now on cpu; make the optimizer after moving the model", "eager"),
        (lambda model, _: model.bfloat16(), True, "make a new optimizer after converting or resizing", "on_demand"),
        (resized, False, "make a new optimizer after converting or resizing", "eager"),
    ],
)
def test_a_parameter_that_was_changed_is_refused(
    change: Callable[[nn.Module, AdamW], object], in_flight: bool, words: str, delivery: str
) -> None:
    model, twin = model_of(), model_of()
    options: dict[str, Any] = {"speculation": "always", "delivery": delivery, "module": model, "bucket_numel": 1024}
    with AdamW(model.parameters(), **options) as optimizer, AdamW(twin.parameters(), speculation="never") as plain:
        train(model, optimizer, range(3))
        train(twin, plain, range(3))
        optimizer.zero_grad()
        if in_flight:
            batch(model, 3).backward()
        change(model, optimizer)
        with pytest.raises((StateError, ArgumentError), match=words):
            optimizer.step()
        if change is negated:
            change(model, optimizer)  # back
        optimizer.zero_grad()
        found, expected = optimizer.state_digests(), plain.state_digests()
        assert all(found[name] == expected[name] for name in ("master", "exp_avg", "exp_avg_sq"))
