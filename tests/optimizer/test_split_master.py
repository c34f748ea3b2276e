"""AdamW with master_dtype="split": the bits do not depend on the schedule, and are those of whole masters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW
from superoffload.engine.speculation_schedule import Schedule
from superoffload.errors import ArgumentError
from tests.support.adamw_training import assert_worker_threads, batch, check_counters, model_of, worker_threads
from tests.support.link_runs import wide_model
from tests.support.split_masters import SPLIT, assert_split, shard_of


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


def test_parameters_that_come_later_are_split_too() -> None:
    digests = []
    for mode in ("never", "always"):
        model, more = model_of(torch.bfloat16), nn.Linear(4, 4).bfloat16()
        torch.manual_seed(1)
        nn.init.normal_(more.weight)
        nn.init.zeros_(more.bias)
        with made(model, mode) as optimizer:
            for step in range(4):
                if step == 2:
                    optimizer.add_param_group({"params": list(more.parameters()), "lr": 0.1})
                optimizer.zero_grad()
                (batch(model, step) + more(torch.ones(4).bfloat16()).square().sum()).backward()
                optimizer.step()
                assert_split(optimizer)
            assert shard_of(optimizer, more.weight).upper is not None
            digests.append(optimizer.state_digests())
    assert digests[0] == digests[1]


def nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@pytest.mark.parametrize("steps", [0, 4])
def test_what_is_kept_of_each_parameter(steps: int) -> None:
    """2 bytes of remainder and 2 of shadow, which is the upper half: at first, and after buckets were made anew."""
    model = wide_model(torch.bfloat16)
    with made(model, max_grad_norm=0.3) as optimizer:
        for step in range(steps):
            optimizer.zero_grad()
            batch(model, step).backward()
            optimizer.step()
        engine = optimizer._engine
        assert engine.layout.observed == (steps > 0)
        shadows = {bucket.shadow.untyped_storage().data_ptr() for bucket in engine.buckets}
        for shard in engine.shards:
            assert shard.upper is not None
            assert len(shard.upper.parts) == len(engine.layout.places_of(shard))
            assert all(part.untyped_storage().data_ptr() in shadows for part in shard.upper.parts)
            assert nbytes(shard.master) == 2 * shard.numel
        for bucket in engine.buckets:
            assert nbytes(bucket.shadow) == nbytes(bucket.gradient) == 2 * bucket.padded
        assert optimizer.stats()["journal_reserved_bytes"] <= sum(2 * b.padded + 1024 for b in engine.buckets)
        assert_split(optimizer)


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
