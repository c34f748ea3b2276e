"""AdamW with master_dtype="split": the bits do not depend on the schedule, and are those of whole masters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from superoffload import AdamW
from superoffload.engine.schedule import Schedule
from superoffload.errors import ArgumentError
from tests.support.adamw_training import assert_worker_threads, check_counters, model_of, worker_threads
from tests.support.fake_cuda_training import wide_model
from tests.support.split_masters import SPLIT, assert_split


@contextmanager
def made(model: nn.Module, mode: str = "always", share: float = 0.0, **options: Any) -> Iterator[AdamW]:
    """``share``: of what was not speculated, how much is published first and settled later."""
    first, *rest = model.parameters()
    groups = [{"params": [first], "lr": 3e-3, "weight_decay": 0.1}, {"params": rest, "betas": (0.8, 0.99)}]
    options = {"lr": 1e-2, "threads": 2, "bucket_numel": 1024, **SPLIT, **options}
    with (
        mock.patch.object(Schedule, "share_to_publish", lambda *_: share),
        AdamW(groups, speculation=mode, **options) as optimizer,
    ):
        yield optimizer
    check_counters(optimizer)


def test_the_bits_of_whole_masters_in_every_schedule() -> None:
    """Where gradients do not depend on parameters, which differ from those of whole masters at ties."""
    found, fates = [], {}
    for master_dtype, mode, share in (
        ("fp32", "never", 0.0), ("split", "never", 0.0), ("split", "always", 0.0), ("split", "always", 1.0)
    ):  # fmt: skip
        model = wide_model(torch.bfloat16)
        with made(model, mode, share, master_dtype=master_dtype) as optimizer:
            for step in range(10):
                optimizer.zero_grad()
                generator = torch.Generator().manual_seed(step)
                for param in model.parameters():
                    (param * torch.randn(param.shape, generator=generator).bfloat16()).sum().backward()
                optimizer.max_grad_norm = 1.0 if step % 3 == 2 else None
                if step == 4:
                    next(model.parameters()).grad = None
                if step == 6:
                    optimizer.param_groups[0]["lr"] = 2e-2
                optimizer.step()
            digests = optimizer.state_digests()
            found.append([digests[name] for name in ("master", "exp_avg", "exp_avg_sq")])
            if master_dtype == "split":
                assert_split(optimizer)
            fates = optimizer.stats()
            if (mode, share) == ("always", 0.0):
                assert all(fates[f"buckets_{fate}"] > 0 for fate in ("committed", "replayed", "undone", "stepped"))
    assert all(one == found[0] for one in found)
    assert fates["buckets_two_phase"] > 0 and fates["buckets_speculated"] > 0


def test_other_values_are_refused() -> None:
    model, threads = model_of(torch.float16), worker_threads()
    wrong: list[Any] = ["half", None, torch.bfloat16, True, ["split"]]
    for value in wrong:
        with pytest.raises(ArgumentError, match=r"master_dtype=.*expected 'fp32', or 'split'"):
            AdamW(model.parameters(), master_dtype=value)
    with pytest.raises(ArgumentError, match=r"master_dtype='split': .*\(0.weight is torch.float16\)"):
        AdamW(model.named_parameters(), **SPLIT)
    with pytest.raises(ValueError, match="params: empty; expected parameters to train"):
        AdamW([], **SPLIT)
    assert_worker_threads(set(threads))
