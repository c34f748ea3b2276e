"""accumulate_dtype="fp32": micro-batches of bf16 and fp16 parameters add up in fp32, whatever adds them where."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from superoffload import AdamW
from superoffload.engine.speculation_schedule import MODES
from tests.support.adamw_training import batch, check_counters
from tests.support.compatibility import compat
from tests.support.fp32_gradients import (
    as_it_is,
    check_checkpoint,
    declared,
    needs_grad_dtype,
    trained,
)
from tests.support.micro_batches import (
    HALVES,
    ROW,
    Window,
    accelerated,
    in_own_dtype,
    loop,
    losses_of,
    summed,
    told,
    train_windows,
)
from tests.support.over_stand_in import SOMETIMES_SLOWER


def expected_digests(dtype: torch.dtype, train: Callable[..., None] = train_windows) -> dict[str, str]:
    return trained(declared, partial(train, summed), dtype, speculation="never").state_digests()


@needs_grad_dtype
@pytest.mark.parametrize("window", [loop, told])
@pytest.mark.parametrize("dtype", HALVES)
def test_the_bits_of_sums_that_torch_makes_in_fp32(dtype: torch.dtype, window: Window) -> None:
    expected = expected_digests(dtype)
    for mode in MODES:
        found = trained(as_it_is, partial(train_windows, window), dtype, speculation=mode, accumulate_dtype="fp32")
        check_counters(found)
        assert found.state_digests() == expected, mode
        assert found.stats()["skipped_steps"] == 1 and found.stats()["clipped_steps"] == 1
        assert bool(found.stats()["buckets_speculated"]) or mode != "always"
    rounded = trained(as_it_is, partial(train_windows, window), dtype).state_digests()
    assert rounded["master"] != expected["master"], "these sums are none that the parameters' dtype could hold"


@needs_grad_dtype
def test_the_same_graph_twice_and_undone() -> None:
    def twice(adding: Any, model: nn.Module, optimizer: Any) -> None:
        for seed in range(4):
            optimizer.zero_grad()
            loss = batch(model, seed)
            if adding is summed:
                params = list(model.parameters())
                first = in_own_dtype(loss, params, retain_graph=True)
                second = in_own_dtype(0.3 * loss, params)
                for param, one, other in zip(params, first, second, strict=True):
                    param.grad = one.float() + other.float()
            else:
                loss.backward(retain_graph=True)
                (0.3 * loss).backward()
            optimizer.step()

    expected = expected_digests(torch.bfloat16, twice)
    for mode in MODES:
        found = trained(as_it_is, partial(twice, loop), torch.bfloat16, speculation=mode, accumulate_dtype="fp32")
        assert found.state_digests() == expected
        assert bool(found.stats()["buckets_undone"]) or mode != "always"


@needs_grad_dtype
def test_uses_of_a_parameter_within_one_backward() -> None:
    """docs/edits.md says that autograd widens each before it adds them."""
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(512).bfloat16())
    factors = [torch.randn(512).bfloat16() for _ in range(6)]
    with AdamW([param], accumulate_dtype="fp32", threads=1):
        sum((param * factor).sum() for factor in factors).backward()  # type: ignore[union-attr]  # of at least one factor, so no int
        exact = torch.stack([factor.double() for factor in factors]).sum(0)
        assert param.grad is not None and (param.grad.double() - exact).abs().max() < 1e-5


@compat(ROW, "single")
@compat(ROW, "stand_in", note=SOMETIMES_SLOWER)
@needs_grad_dtype
@pytest.mark.parametrize("window", [loop, told])
@pytest.mark.parametrize("clip", [False, True])
def test_gradients_are_in_fp32_and_can_be_clipped(window: Window, clip: bool) -> None:
    """By hand too, and by a GradScaler, which refuses fp16 gradients."""

    def train(window: Window, model: nn.Module, optimizer: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for number in range(4):
            optimizer.zero_grad()
            window(optimizer, (scaler.scale(loss) for loss in losses_of(model, number, 3)))
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            for param in model.parameters():
                assert param.grad is not None and param.grad.dtype is torch.float32
            scaler.step(optimizer)
            scaler.update()

    expected = trained(declared, partial(train, summed), torch.float16, speculation="never")
    assert expected.stats()["steps"] == 4
    for mode in MODES:
        found = trained(
            as_it_is, partial(train, window), torch.float16, speculation=mode, accumulate_dtype=torch.float32
        )
        assert found.state_digests() == expected.state_digests()


def test_a_model_and_its_optimizer_may_end_together_as_garbage() -> None:
    """Weak references to the parameters are gone when the optimizer closes itself; pytest fails what __del__ raises."""
    model: Any = nn.Linear(3, 3).bfloat16()
    model.optimizer = AdamW(model.parameters(), accumulate_dtype="fp32")
    model.optimizer.trained = model
    ended = weakref.ref(model)
    del model
    gc.collect()
    assert ended() is None


def test_fp32_parameters_are_left_as_they_are() -> None:
    found = [
        trained(as_it_is, partial(train_windows, loop), torch.float32, accumulate_dtype=dtype)
        for dtype in (None, "fp32")
    ]
    assert found[0].state_digests() == found[1].state_digests()


@needs_grad_dtype
def test_checkpoints_are_the_same() -> None:
    """Saved with it, loaded without, and the other way."""
    with_it: dict[str, Any] = {"accumulate_dtype": "fp32"}
    check_checkpoint(as_it_is, as_it_is, (with_it, {}))
    check_checkpoint(as_it_is, as_it_is, ({}, with_it))


# ---- loops of others ------------------------------------------------------------------------------------------------


@compat(ROW, "single")
@needs_grad_dtype
@pytest.mark.parametrize("mode", MODES)
def test_windows_of_accelerate(mode: str) -> None:
    def by_hand(model: nn.Module, optimizer: Any) -> None:
        for number in range(3):
            summed(optimizer, (batch(model, 4 * number + micro) / 4 for micro in range(4)))
            optimizer.step()

    expected = trained(declared, by_hand, torch.bfloat16, speculation="never").state_digests()
    found = trained(
        as_it_is, partial(accelerated, micro_batches=4), torch.bfloat16, speculation=mode, accumulate_dtype="fp32"
    )
    assert found.state_digests() == expected and found.stats()["buckets_undone"] == 0
    assert trained(as_it_is, partial(accelerated, micro_batches=4), torch.bfloat16).state_digests() != expected


@needs_grad_dtype
def test_trainer(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install 'superoffload[transformers]'")
    from superoffload.integrations.transformers import offload
    from tests.support import hugging_face

    def run(source: Callable[[nn.Module], None], mode: str, **options: Any) -> dict[str, str]:
        model = hugging_face.model_of(dtype=torch.bfloat16)
        source(model)
        trainer = hugging_face.trainer_of(tmp_path, model, None, max_steps=3, gradient_accumulation_steps=4)
        offload(trainer, speculation=mode, threads=1, **options)
        trainer.train()
        return hugging_face.end(trainer)

    expected = run(declared, "never")
    assert [run(as_it_is, mode, accumulate_dtype="fp32") for mode in MODES] == [expected] * len(MODES)
    assert run(as_it_is, "never") != expected
