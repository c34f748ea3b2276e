"""Loops of Accelerate over a device, which say where windows of micro-batches end."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from superoffload import AdamW
from tests.support.adamw_training import batch, model_of
from tests.support.fake_cuda import Fake, on_fake_device, on_host
from tests.support.fake_cuda_training import LATE, NEEDED_AGAIN, OPTIONS, taken_back

accelerate = pytest.importorskip("accelerate", reason="needs accelerate: pip install 'superoffload[transformers]'")


def accelerated(fake: Fake | None) -> dict[str, str]:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    plain = model_of()
    if fake is not None:
        plain.register_forward_pre_hook(lambda *_: fake.synchronize())
    with on_fake_device(fake) if fake is not None else on_host(), AdamW(plain.parameters(), **OPTIONS) as inner:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=3)
        seeds: Any = torch.utils.data.DataLoader(torch.arange(8), batch_size=1)  # type: ignore[arg-type]  # a tensor has all that it asks of a Dataset
        model, optimizer, seeds = accelerator.prepare(plain, inner, seeds)
        for _ in range(2):
            for seed in seeds:  # the last window has two
                with accelerator.accumulate(model):
                    accelerator.backward(batch(model, int(seed)))
                    optimizer.step()
                    optimizer.zero_grad()
        if fake is not None:
            fake.synchronize()
        assert inner.stats()["steps"] == 6
        return inner.state_digests()


def test_accelerate(fake: Fake) -> None:
    """It says where a window ends, so that nothing is stepped too early."""
    expected = accelerated(None)
    fake.delays(1, LATE)
    with taken_back() as taken, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert accelerated(fake) == expected
    assert not taken and not any(NEEDED_AGAIN in str(one.message) for one in caught)


def test_a_window_that_was_left_half_way_is_another_loops() -> None:
    """The first step shows it; from then on backward overlaps as ever, until Accelerate begins another window."""
    accelerate.state.GradientState._reset_state()
    state = accelerate.state.GradientState()
    model = model_of()
    try:
        with on_host(), AdamW(model.parameters(), **OPTIONS) as optimizer:
            overlapped, told = [], []
            for state.sync_gradients in (False, False, False, True, False, False):
                before = optimizer.stats()["buckets_speculated"]
                batch(model, 1).backward()
                overlapped.append(optimizer.stats()["buckets_speculated"] > before)
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    optimizer.step()
                told.append(any("sync_gradients=False" in str(one.message) for one in caught))
                optimizer.zero_grad()
            assert overlapped == [False, True, True, True, False, True]
            assert told == [True, False, False, False, False, False]
    finally:
        accelerate.state.GradientState._reset_state()
