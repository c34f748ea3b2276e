"""fp32 gradients of bf16 and fp16 parameters are taken as they are, whichever way they come."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from superoffload import AdamW, CPUAdamW
from superoffload.engine.speculation_schedule import MODES
from superoffload.errors import ArgumentError, HostMemoryError
from tests.support.adamw_training import assert_close_to_torch, batch, check_counters, model_of
from tests.support.fp32_gradients import (
    SOURCES,
    Source,
    as_it_is,
    by_kernels,
    check_checkpoint,
    declared,
    gradient_of,
    needs_grad_dtype,
    of_any_dtype,
    precise_loss,
    steps,
    trained,
)

pytestmark = needs_grad_dtype


def _plain(model: nn.Module, optimizer: Any) -> None:
    steps(model, optimizer)


def _clipped(model: nn.Module, optimizer: Any) -> None:
    for seed, norm in enumerate((0.01, None, 0.5, 100.0)):
        optimizer.max_grad_norm = norm
        steps(model, optimizer, range(seed, seed + 1))


def _accumulated(model: nn.Module, optimizer: Any) -> None:
    for seed in range(4):
        optimizer.zero_grad()
        precise_loss(model, 2 * seed).backward()
        precise_loss(model, 2 * seed + 1).backward()
        optimizer.step()


def _accumulated_by_name(model: nn.Module, optimizer: Any) -> None:
    for seed in range(4):
        optimizer.zero_grad()
        with optimizer.accumulate():
            precise_loss(model, 2 * seed).backward()
        precise_loss(model, 2 * seed + 1).backward()
        optimizer.step()


def _edited(model: nn.Module, optimizer: Any) -> None:
    for seed in range(4):
        optimizer.zero_grad()
        precise_loss(model, seed).backward()
        for param in list(model.parameters())[seed:]:
            with torch.no_grad():
                gradient_of(param).mul_(0.75)
        optimizer.step()


def _poisoned(model: nn.Module, optimizer: Any) -> None:
    for seed in range(4):
        optimizer.zero_grad()
        precise_loss(model, seed).backward()
        if seed == 2:
            gradient_of(next(model.parameters())).view(-1)[0] = torch.inf
        optimizer.step()


def _given_up(model: nn.Module, optimizer: Any) -> None:
    steps(model, optimizer, range(2))
    for seed in (8, 9):
        precise_loss(model, seed).backward()
        optimizer.zero_grad()
    steps(model, optimizer, range(2, 4))


CODES = (_plain, _clipped, _accumulated, _accumulated_by_name, _edited, _poisoned, _given_up)


@pytest.mark.parametrize("number", range(len(CODES)), ids=lambda number: CODES[number].__name__)
def test_every_way_gives_the_same_bits(number: int) -> None:
    code, dtype = CODES[number], (torch.bfloat16, torch.float16)[number % 2]
    expected = trained(declared, code, dtype, speculation="never").state_digests()
    for i, (name, source) in enumerate(SOURCES.items()):
        for mode in {"always", MODES[(i + number) % len(MODES)]}:
            optimizer = trained(source, code, dtype, speculation=mode)
            check_counters(optimizer)
            assert optimizer.state_digests() == expected, (name, mode)
            assert bool(optimizer.stats()["buckets_speculated"]) == (mode == "always") or mode == "adaptive"
    rounded = trained(as_it_is, code, dtype).state_digests()
    assert rounded["master"] != expected["master"], "these gradients are none that the parameters' dtype could hold"


@pytest.mark.parametrize(("source", "mode", "norm"), [(declared, "never", None), (by_kernels, "always", 0.05)])
def test_as_torch_on_fp32_copies_with_the_same_gradients(source: Source, mode: str, norm: float | None) -> None:
    model = model_of(torch.bfloat16)
    source(model)
    copies = [param.detach().float().requires_grad_() for param in model.parameters()]
    theirs = torch.optim.AdamW(copies, lr=1e-3)
    optimizer = AdamW(model.parameters(), lr=1e-3, max_grad_norm=norm, speculation=mode, threads=2, bucket_numel=256)
    with optimizer:
        for seed in range(30):
            optimizer.zero_grad()
            precise_loss(model, seed).backward()
            for copy, param in zip(copies, model.parameters(), strict=True):
                assert gradient_of(param).dtype is torch.float32
                copy.grad = gradient_of(param).clone()
            optimizer.step()
            squares = sum(float(copy.grad.double().square().sum()) for copy in copies if copy.grad is not None)
            assert optimizer.grad_norm == pytest.approx(squares**0.5, rel=1e-9)
            if norm is not None:
                torch.nn.utils.clip_grad_norm_(copies, norm)
            theirs.step()
        for copy, param in zip(copies, model.parameters(), strict=True):
            master = optimizer.state[param]["master"]
            assert_close_to_torch(master, copy.detach(), 30 * 1e-3)
            assert torch.equal(param.detach(), master.to(torch.bfloat16))


def test_a_bucket_has_gradients_of_one_dtype_and_bytes_are_counted() -> None:
    model = model_of(torch.bfloat16)
    weights = [param for param in model.parameters() if param.dim() == 2]
    declared(nn.ParameterList(weights))
    wide, all_of_them = sum(p.numel() for p in weights), sum(p.numel() for p in model.parameters())
    with AdamW(model.parameters(), threads=2) as optimizer:
        steps(model, optimizer, range(3))
        dtypes = [{piece.shard.gradient_dtype for piece in bucket.pieces} for bucket in optimizer._engine.buckets]
        assert sorted(map(str, dtypes)) == ["{torch.bfloat16}", "{torch.float32}"]
        assert optimizer.stats()["bytes_down"] == 3 * (2 * all_of_them + 2 * wide)


def test_a_gradient_that_is_wider_than_was_said() -> None:
    """The first of them is taken for the first of its group. Gradients that have arrived move to the new buckets."""

    def narrow_at_first(model: nn.Module) -> None:
        _after_arrivals(2, model, lambda: _first_three_declared(model))

    for mode in MODES:
        found = trained(narrow_at_first, _plain, torch.bfloat16, speculation=mode, bucket_numel=1 << 20)
        sizes = [6] if mode == "never" else [3, 3]  # in step() none has arrived before the first
        assert [len(bucket.pieces) for bucket in found._engine.buckets] == sizes
        known = trained(_first_three_declared, _plain, torch.bfloat16, speculation=mode, bucket_numel=1 << 20)
        assert found.state_digests() == known.state_digests()


def _after_arrivals(count: int, model: nn.Module, change: Callable[[], None]) -> None:
    """In the first backward, behind so many gradients."""
    left = [change] + [lambda: None] * (count - 1)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda _: left.pop()() if left else None)


def _first_three_declared(model: nn.Module) -> None:
    declared(nn.ParameterList(list(model.parameters())[:3]))


def test_a_gradient_that_is_narrower_than_was_said_is_widened() -> None:
    """Which is exact, where a parameter takes any dtype and where that changes between steps."""

    def code(model: nn.Module, optimizer: Any) -> None:
        steps(model, optimizer, range(2))
        optimizer.zero_grad()
        for param in model.parameters():
            param.grad_dtype = torch.bfloat16
        steps(model, optimizer, range(2, 4))

    def by_hand(model: nn.Module, optimizer: Any) -> None:
        steps(model, optimizer, range(2))
        for seed in (2, 3):
            optimizer.zero_grad()
            precise_loss(model, seed).backward()
            for param in model.parameters():
                assert param.grad is not None
                param.grad = param.grad.to(torch.bfloat16).float()
            optimizer.step()

    expected = trained(declared, by_hand, torch.bfloat16).state_digests()
    for source in (declared, of_any_dtype):
        for mode in MODES:
            assert trained(source, code, torch.bfloat16, speculation=mode).state_digests() == expected


def test_too_late_in_a_step() -> None:
    """Others are packed: an error that says what to do, and the step can be given up."""
    model = model_of(torch.bfloat16)
    first = next(model.parameters())
    _after_arrivals(5, model, lambda: declared(nn.ParameterList([first])))
    with AdamW(model.parameters(), threads=2, bucket_numel=64) as optimizer:
        before = optimizer.state_digests()
        message = (
            r"params'\]\[0\]: its gradient is torch.float32.*torch.bfloat16 was expected.*packed; set p.grad_dtype"
        )
        with pytest.raises(ArgumentError, match=message):
            precise_loss(model, 0).backward()
        optimizer.zero_grad()
        assert optimizer.state_digests() == before
        steps(model, optimizer, range(2))
        assert optimizer.stats()["steps"] == 2


def test_a_wider_gradient_than_in_the_steps_before_is_an_error() -> None:
    model = model_of(torch.bfloat16)
    with AdamW(model.parameters(), threads=2) as optimizer:
        steps(model, optimizer, range(2))
        before = optimizer.state_digests()
        optimizer.zero_grad()
        declared(model)
        with pytest.raises(ArgumentError, match=r"float32, and torch.bfloat16 was expected, as in the steps before"):
            batch(model, 3).backward()
        optimizer.zero_grad()
        assert optimizer.state_digests() == before


def test_dtypes_that_no_kernel_reads_are_refused() -> None:
    refused = [
        (torch.bfloat16, torch.float64, "torch.bfloat16, or float32"),
        (torch.bfloat16, torch.float16, "torch.bfloat16, or float32"),
        (torch.float32, torch.bfloat16, "torch.float32"),
    ]
    for own, declared_as, expected in refused:
        model = model_of(own)
        next(model.parameters()).grad_dtype = declared_as
        with pytest.raises(ArgumentError, match=rf"grad_dtype is {declared_as}, expected .* {expected}"):
            AdamW(model.parameters())


def test_memory_that_is_refused_with_gradients_in_hand() -> None:
    """Those that had arrived are brought again by the step that their user makes of them."""

    def gradients(model: nn.Module) -> list[torch.Tensor]:
        precise_loss(model, 0).backward()
        found = [param.grad for param in model.parameters() if param.grad is not None]
        model.zero_grad()
        return found

    wide = model_of(torch.bfloat16)
    _first_three_declared(wide)
    values = gradients(wide)
    digests = []
    for refuses in (False, True):
        model = model_of(torch.bfloat16)
        _after_arrivals(2, model, partial(_first_three_declared, model))
        with AdamW(model.parameters(), lr=1e-2, threads=2, bucket_numel=1 << 20) as optimizer:
            refused = mock.patch.object(optimizer._engine.link, "attach", side_effect=HostMemoryError("refused"))
            if refuses:
                with refused, pytest.raises(HostMemoryError, match="refused"):
                    precise_loss(model, 0).backward()
            _first_three_declared(model)
            for param, value in list(zip(model.parameters(), values, strict=True))[: 4 if refuses else None]:
                param.grad = value.clone()
            optimizer.step()
            assert [shard.steps for shard in optimizer._engine.shards] == [1] * 6
            digests.append(optimizer.state_digests())
    assert digests[0] == digests[1]


FP32_SUMS = {"accumulate_dtype": "fp32"}


@pytest.mark.parametrize(
    ("before", "after", "options"),
    [
        (as_it_is, declared, ({}, {})),
        (by_kernels, declared, ({}, {})),
        (as_it_is, as_it_is, (FP32_SUMS, {})),
        (as_it_is, as_it_is, ({}, FP32_SUMS)),
    ],
)
def test_checkpoints_do_not_depend_on_it(
    before: Source, after: Source, options: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    """Saved with gradients of one dtype, loaded for those of another: what is saved is the same."""
    check_checkpoint(before, after, options)


def test_the_kernel_alone_takes_them_too() -> None:
    expected = trained(declared, _plain, torch.bfloat16)
    model = model_of(torch.bfloat16)
    declared(model)
    steps(model, CPUAdamW(model.parameters(), lr=1e-2))
    for param, state in zip(model.parameters(), expected.state.values(), strict=True):
        assert torch.equal(param, state["master"].bfloat16())
