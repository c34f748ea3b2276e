"""AdamW with state_dtype="bf16": reproducible, schedule-free, checkpointed, and refused where it is not understood."""

from __future__ import annotations

import pytest
import torch

import superoffload
from superoffload.errors import ArgumentError


def train(
    speculation: str, *, seed: int = 0, steps: int = 12, clip_at: tuple[int, ...] = (4, 9), threads: int = 2
) -> tuple[dict[str, str], superoffload.AdamW]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(40, 120), torch.nn.Tanh(), torch.nn.Linear(120, 40)).bfloat16()
    optimizer = superoffload.AdamW(
        model.parameters(), speculation=speculation, state_dtype="bf16", seed=seed, bucket_numel=2048, threads=threads
    )
    data = torch.Generator().manual_seed(2)
    for step in range(steps):
        # Just below the norm to come: the clip shows only once most buckets were speculated.
        optimizer.max_grad_norm = 0.9 * optimizer.grad_norm if step in clip_at else None
        optimizer.zero_grad()
        model(torch.randn(16, 40, generator=data).bfloat16()).float().square().mean().backward()
        optimizer.step()
    return optimizer.state_digests(), optimizer


def test_schedule_and_threads_do_not_change_a_bit_and_the_seed_does() -> None:
    always, optimizer = train("always")
    stats = optimizer.stats()
    assert stats["buckets_replayed"] > 0 and stats["buckets_committed"] > 0
    assert always == train("never")[0] == train("always", threads=1)[0]
    assert always != train("always", seed=1)[0]
    assert all(s["exp_avg"].dtype == s["exp_avg_sq"].dtype == torch.bfloat16 for s in optimizer.state.values())


def test_resume_is_bit_exact() -> None:
    _, whole = train("always", steps=6, clip_at=())
    state = whole.state_dict()
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(40, 120), torch.nn.Tanh(), torch.nn.Linear(120, 40)).bfloat16()
    other = superoffload.AdamW(model.parameters(), state_dtype="bf16", bucket_numel=1024)
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), whole.param_groups[0]["params"], strict=True):
            mine.copy_(theirs)
    other.load_state_dict(state)
    for optimizer in (whole, other):
        for i, param in enumerate(optimizer.param_groups[0]["params"]):
            param.grad = torch.full_like(param, 0.01 * (i + 1))
        optimizer.step()
    assert whole.state_digests() == other.state_digests()


@pytest.mark.parametrize(("name", "value"), [("state_dtype", "fp16"), ("state_dtype", 16), ("seed", -1), ("seed", 0.5)])
def test_bad_values_are_named(name: str, value: object) -> None:
    with pytest.raises(ArgumentError, match=name):
        superoffload.AdamW([torch.nn.Parameter(torch.zeros(3))], **{name: value})  # type: ignore[arg-type]
