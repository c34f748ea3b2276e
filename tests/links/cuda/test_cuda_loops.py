"""Loops of others over a device: FSDP2 that adds up by itself, Accelerate and Trainer, which say where windows end."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from superoffload import AdamW
from superoffload.optimizer.accelerate_window import Window
from tests.support.adamw_training import batch, grads_of, model_of
from tests.support.fake_cuda import Fake, on_fake_device, on_host
from tests.support.freed_gradients import NEEDED_AGAIN, OPTIONS, seen, taken_back
from tests.support.link_runs import LATE
from tests.support.rank_processes import error_of, flat_mesh, net, on_ranks, optimizer_of, shard, tokens_of

# ---- fully_shard ----------------------------------------------------------------------------------------------------


def sharded(model: Any, optimizer: AdamW, how: str, synchronize: Callable[[], None]) -> list[Any]:
    """``synchronize``: before parameters are gathered, which a device would do behind its stream."""
    found = []
    for window in range(3):
        optimizer.zero_grad(set_to_none=how != "zeroed")
        for micro in range(1 if how in ("plain", "clipped") else 2):
            synchronize()
            model.loss(tokens_of(10 * window + micro, dist.get_rank())).backward()
        if how == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if how == "edited":
            torch._foreach_mul_(grads_of(model), 0.5)
        grads: list[Any] = grads_of(model)
        if how == "read":
            found.append(seen([grad.full_tensor().norm() for grad in grads]))
        optimizer.step()
        if how == "again":
            optimizer.step()
        if how == "read":
            grads = list(grads_of(model))
            found.append(seen([grad.to_local() for grad in grads]))
    return found


def in_rank(how: str, on_device: bool) -> tuple[Any, dict[str, str], int]:
    fake = Fake()
    fake.delays(3, LATE)
    with (
        on_fake_device(fake) if on_device else on_host(),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        model = shard(net(torch.bfloat16, layers=2), flat_mesh())
        with optimizer_of(model, rank_check="off") as optimizer:  # it reads parameters at once
            found = sharded(model, optimizer, how, fake.synchronize)
            fake.synchronize()
            told = sum(NEEDED_AGAIN in str(one.message) for one in caught)
            return found, optimizer.state_digests(), told


@pytest.mark.parametrize("how", ["plain", "windows", "zeroed", "clipped", "edited", "read", "again"])
def test_fully_shard(how: str) -> None:
    Fake()  # compiled here, not by two ranks at once
    expected = on_ranks(2, in_rank, how, False)
    found = on_ranks(2, in_rank, how, True)
    assert [one[:2] for one in found] == [one[:2] for one in expected]
    assert [one[2] for one in found] == [int(how != "plain")] * 2


def spread_in_rank() -> list[str]:
    """Each rank packs its part of a gradient, and frees all of it."""
    fake = Fake()
    with on_fake_device(fake):
        model = net(torch.bfloat16)
        with optimizer_of(model, rank_check="off", replicated="shard") as optimizer:
            for _ in range(2):
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.grad = torch.ones_like(parameter)
                optimizer.step()
            errors = [error_of(grads_of(model)[0].norm)]
            optimizer.zero_grad(set_to_none=False)
            assert not grads_of(model)[0].any()
            optimizer.step()
            fake.synchronize()
            return errors


def test_a_part_of_a_gradient_is_not_taken_for_all_of_it() -> None:
    Fake()  # compiled here, not by two ranks at once
    for (error,) in on_ranks(2, spread_in_rank):
        assert "this rank has packed a part of it" in error and "keep_grads=True" in error


# ---- Accelerate and Trainer -----------------------------------------------------------------------------------------


def as_ever(self: Window) -> bool:
    """Where nothing says where a window ends."""
    return False


Told = Callable[[], Any]
TOLD: dict[bool, Told] = {True: nullcontext, False: lambda: mock.patch.object(Window, "more_to_come", as_ever)}


def accelerated(fake: Fake | None) -> dict[str, str]:
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate: pip install 'superoffload[transformers]'")
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


@pytest.mark.parametrize("told", [True, False])
def test_accelerate(fake: Fake, told: bool) -> None:
    expected = accelerated(None)
    fake.delays(1, LATE)
    with TOLD[told](), taken_back() as taken, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert accelerated(fake) == expected
    assert bool(taken) is not told
    assert any(NEEDED_AGAIN in str(one.message) for one in caught) is not told


def test_accelerate_that_is_reset_is_not_asked() -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate: pip install 'superoffload[transformers]'")
    window = Window()
    state = accelerate.state.GradientState()
    state.sync_gradients = False
    assert window.more_to_come()
    state.sync_gradients = True
    assert not window.more_to_come()
    accelerate.state.GradientState._reset_state()
    assert not window.more_to_come()
    with mock.patch.dict("sys.modules"):
        import sys

        del sys.modules["accelerate.state"]
        assert not Window().more_to_come()
        assert "accelerate.state" not in sys.modules, "loaded for nothing"


def test_a_window_that_was_left_half_way_is_another_loops() -> None:
    """The first step shows it; from then on backward overlaps as ever, until Accelerate begins another window."""
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate: pip install 'superoffload[transformers]'")
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


def trained(folder: Path, fake: Fake | None) -> dict[str, str]:
    from tests.support.hugging_face import end, model_of, trainer_of

    options: dict[str, Any] = {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 16, "max_steps": 8}
    with on_fake_device(fake) if fake is not None else on_host():
        trainer = trainer_of(folder, model_of(), "always", **options)
        if fake is not None:
            trainer.model.register_forward_pre_hook(lambda *_: fake.synchronize())
        trainer.train()  # an epoch is five windows of three, and one of a single batch
        if fake is not None:
            fake.synchronize()
        return end(trainer)


@pytest.mark.parametrize("told", [True, False])
def test_trainer(fake: Fake, told: bool, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install 'superoffload[transformers]'")
    expected = trained(tmp_path, None)
    fake.delays(2, LATE)
    with TOLD[told](), taken_back() as taken, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert trained(tmp_path, fake) == expected
    assert bool(taken) is not told
    assert any(NEEDED_AGAIN in str(one.message) for one in caught) is not told
