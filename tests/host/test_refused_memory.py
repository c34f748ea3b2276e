"""Host memory that the system refuses: what was asked for and what needs less is said; the optimizer stays usable."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from superoffload import AdamW
from superoffload.engine import layout
from superoffload.errors import HostMemoryError, SuperOffloadError
from tests.support.rank_processes import on_ranks

JOURNAL = (
    r"^host memory: 1.15e\+09 GB more were refused by the system, for the undo journals "
    r"\(buckets: \d+\)\. superoffload plan adds up .*speculation='never' \(no journal\)"
)


def refuse_journals(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no system gives, so that native code finds none."""
    monkeypatch.setattr(layout, "reserved_bytes", lambda numel: 1 << 60)


class Shuffled(nn.ModuleList):
    """Gradients come not in the order of registration, so that buckets are laid out anew after the first step."""

    def forward(self, values: Tensor) -> Tensor:
        for index in (1, 0, 2):
            values = self[index](values)
        return values


def shuffled() -> Shuffled:
    torch.manual_seed(0)
    return Shuffled([nn.Linear(24, 24) for _ in range(3)])


def backward(model: Any, seed: int) -> None:
    model(torch.randn(4, 24, generator=torch.Generator().manual_seed(seed))).square().mean().backward()


def step(model: Any, optimizer: AdamW, seed: int) -> None:
    optimizer.zero_grad()
    backward(model, seed)
    optimizer.step()


def digests_after(steps: int) -> dict[str, str]:
    model = shuffled()
    with AdamW(model.parameters(), speculation="never", threads=1, bucket_numel=1024) as optimizer:
        for seed in range(steps):
            step(model, optimizer, seed)
        return optimizer.state_digests()


def test_a_journal_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        refuse_journals(patch)
        with pytest.raises(HostMemoryError, match=JOURNAL) as caught:
            AdamW(shuffled().parameters())
        assert isinstance(caught.value, MemoryError) and isinstance(caught.value, SuperOffloadError)
        AdamW(shuffled().parameters(), speculation="never").close()  # which takes none
    AdamW(shuffled().parameters()).close()


def test_a_journal_after_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is done. What comes after it asks again, and until then the state can be read and saved."""
    model = shuffled()
    with AdamW(model.parameters(), speculation="always", threads=1, bucket_numel=1024) as optimizer:
        with monkeypatch.context() as patch:
            refuse_journals(patch)
            with pytest.raises(HostMemoryError, match=JOURNAL):
                step(model, optimizer, 0)
            assert optimizer.stats()["steps"] == 1
            assert optimizer.state_digests() == digests_after(1)
            saved = optimizer.state_dict()
            for _ in range(2):
                optimizer.zero_grad()
                with pytest.raises(HostMemoryError, match=JOURNAL):
                    backward(model, 1)
            assert optimizer.state_digests() == digests_after(1)
            other = shuffled()
            other.load_state_dict(model.state_dict())
            with AdamW(other.parameters(), speculation="never", threads=1, bucket_numel=1024) as advised:
                advised.load_state_dict(saved)
                step(other, advised, 1)
                assert advised.state_digests() == digests_after(2)
        step(model, optimizer, 1)
        step(model, optimizer, 2)
        assert optimizer.state_digests() == digests_after(3)
        assert optimizer.stats()["buckets_speculated"] > 0


def on_one_rank() -> dict[str, str]:
    model = DistributedDataParallel(shuffled(), bucket_cap_mb=0.001)
    options: dict[str, Any] = {"speculation": "always", "threads": 1, "bucket_numel": 1024, "rank_timeout": 20.0}
    with AdamW(model.parameters(), model=model, rank_check="full", **options) as optimizer:
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:
                refuse_journals(patch)
                with pytest.raises(HostMemoryError, match=JOURNAL):
                    step(model, optimizer, 0)
            else:
                step(model, optimizer, 0)
        step(model, optimizer, 1)
        return optimizer.state_digests()


def test_ranks_stay_together() -> None:
    """The step was completed on the rank that raised, so nothing has diverged."""
    assert on_ranks(2, on_one_rank) == [digests_after(2)] * 2


def test_a_group_is_stepped_once_there_is_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for refused in (False, True):
        model = shuffled()
        with AdamW(model[:2].parameters(), speculation="always", threads=1) as optimizer:
            step(model, optimizer, 0)
            with monkeypatch.context() as patch:
                if refused:
                    refuse_journals(patch)
                    with pytest.raises(HostMemoryError, match=JOURNAL):
                        optimizer.add_param_group({"params": model[2].parameters()})
                else:
                    optimizer.add_param_group({"params": model[2].parameters()})
            step(model, optimizer, 1)
            found.append(optimizer.state_digests())
    assert found[0] == found[1]
