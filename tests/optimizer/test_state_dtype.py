"""AdamW with state_dtype="bf16": reproducible, schedule-free, checkpointed, and refused where it is not understood."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from superoffload import AdamW
from superoffload.errors import ArgumentError

Net = torch.nn.Sequential


def model_of() -> Net:
    torch.manual_seed(1)
    return Net(torch.nn.Linear(40, 120), torch.nn.Tanh(), torch.nn.Linear(120, 40)).bfloat16()


def train(speculation: str = "always", *, seed: int = 0, threads: int = 2) -> tuple[Net, AdamW]:
    model, data = model_of(), torch.Generator().manual_seed(2)
    options: dict[str, Any] = {"state_dtype": "bf16", "bucket_numel": 2048}
    optimizer = AdamW(model.parameters(), speculation=speculation, seed=seed, threads=threads, **options)
    for step in range(12):
        # Just below the norm to come: the clip shows only once most buckets were speculated.
        optimizer.max_grad_norm = 0.9 * optimizer.grad_norm if step in (4, 9) else None
        optimizer.zero_grad()
        model(torch.randn(16, 40, generator=data).bfloat16()).float().square().mean().backward()
        optimizer.step()
    return model, optimizer


def test_schedule_and_threads_do_not_change_a_bit_and_the_seed_does() -> None:
    _, optimizer = train()
    always, stats = optimizer.state_digests(), optimizer.stats()
    assert stats["buckets_replayed"] > 0 and stats["buckets_committed"] > 0
    assert always == train("never")[1].state_digests() == train(threads=1)[1].state_digests()
    assert always != train(seed=1)[1].state_digests()
    assert all(s["exp_avg"].dtype == s["exp_avg_sq"].dtype == torch.bfloat16 for s in optimizer.state.values())


def test_bad_values_are_named() -> None:
    wrong: list[tuple[str, Any]] = [("state_dtype", "fp16"), ("state_dtype", 16), ("seed", -1), ("seed", 0.5)]
    for name, value in wrong:
        with pytest.raises(ArgumentError, match=name):
            AdamW([torch.nn.Parameter(torch.zeros(3))], **{name: value})
