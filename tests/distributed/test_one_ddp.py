"""One DistributedDataParallel: several optimizers on it, one after the other, and ranks that run out of inputs."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from superoffload import AdamW
from tests.support.rank_processes import Net, error_of, loss_of, net, on_ranks

OPTIONS: dict[str, Any] = {"lr": 3e-3, "threads": 1, "bucket_numel": 1024, "rank_timeout": 20.0}


def split(model: Net) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    training = [p for p in model.parameters() if p.requires_grad]
    return training[:3], training[3:]


def two_at_once(make: str) -> tuple[list[Any], list[int]]:
    """As a GAN has them: each steps its own part, and the second one in every other step only."""
    inner = net(torch.float32)
    model = DistributedDataParallel(inner, bucket_cap_mb=0.005)
    optimizers: list[Any] = []
    for params, lr in zip(split(inner), (3e-3, 1e-2), strict=True):
        if make == "torch":
            optimizers.append(torch.optim.AdamW(params, lr=lr))
        else:
            optimizers.append(AdamW(params, **{**OPTIONS, "lr": lr}, model=model, speculation=make))
    for seed in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, seed).backward()
        optimizers[0].step()
        if seed % 2:
            optimizers[1].step()
    speculated = [int(one.stats()["buckets_speculated"]) for one in optimizers if isinstance(one, AdamW)]
    for optimizer in optimizers if make != "torch" else ():
        optimizer.close()
    return [p.tolist() for p in inner.parameters()], speculated


def test_two_optimizers_step_parts_of_one_model() -> None:
    always, never, theirs = (on_ranks(2, two_at_once, make) for make in ("always", "never", "torch"))
    assert [weights for weights, _ in always] == [weights for weights, _ in never]
    assert all(min(speculated) > 0 for _, speculated in always)
    for (ours, _), (torchs, _) in zip(always, theirs, strict=True):
        for mine, other in zip(ours, torchs, strict=True):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(other), rtol=1e-5, atol=1e-6)


def one_after_the_other() -> list[tuple[bool, int]]:
    """The first optimizer is closed, the second one collected, and the third has the model."""
    model = DistributedDataParallel(net(torch.float32), bucket_cap_mb=0.005)
    twin = DistributedDataParallel(net(torch.float32), bucket_cap_mb=0.005)
    found = []
    for phase in range(3):
        optimizer = AdamW(model.parameters(), **OPTIONS, model=model, speculation="always")
        other = AdamW(twin.parameters(), **OPTIONS, speculation="never")
        for seed in range(2):
            for one, its in ((model, optimizer), (twin, other)):
                its.zero_grad()
                loss_of(one, 10 * phase + seed).backward()
                its.step()
        equal = all(map(torch.equal, model.parameters(), twin.parameters()))
        found.append((equal, int(optimizer.stats()["buckets_speculated"])))
        loss_of(model, 50).backward()  # given up in the middle of a window
        loss_of(twin, 50).backward()
        other.close()
        if phase != 1:
            optimizer.close()
        del optimizer
        gc.collect()
    loss_of(model, 0).backward()
    return found


def test_each_phase_gets_its_own_optimizer() -> None:
    for found in on_ranks(2, one_after_the_other):
        assert all(equal and speculated > 0 for equal, speculated in found)


def uneven(kind: str, speculation: str = "adaptive") -> Any:
    """Rank 0 has two batches more than rank 1. An error, or weights and how many buckets were committed and undone."""
    inner = net(torch.float32)
    model = DistributedDataParallel(inner, bucket_cap_mb=0.005)
    trained = [p for p in inner.parameters() if p.requires_grad]
    optimizer: Any = torch.optim.AdamW(trained, lr=3e-3)
    if kind != "torch":
        optimizer = AdamW(trained, **OPTIONS, model=model, replicated=kind, speculation=speculation)

    def train() -> None:
        with model.join():
            for seed in range(3 if dist.get_rank() else 5):
                optimizer.zero_grad()
                loss_of(model, seed).backward()
                optimizer.step()

    with optimizer if isinstance(optimizer, AdamW) else nullcontext():
        if kind not in ("torch", "local"):
            return error_of(train)
        train()
        stats = optimizer.stats() if kind == "local" else {"buckets_committed": 0, "buckets_undone": 0}
        return [p.tolist() for p in inner.parameters()], stats["buckets_committed"], stats["buckets_undone"]


def test_ranks_that_run_out_of_inputs_end_with_an_error_that_says_what_works() -> None:
    first, second = on_ranks(2, uneven, "replicate")
    assert first.startswith("RankError: ") and "rank 1 has no more inputs" in first
    assert second.startswith("StateError: ") and "this rank has no more inputs" in second
    for error in (first, second):
        assert "join()" in error and "replicated='local'" in error


def test_ranks_that_step_by_themselves_take_what_ddp_has_reduced_and_run_out_of_inputs_as_with_torch() -> None:
    always, never, theirs = (on_ranks(2, uneven, *how) for how in (("local", "always"), ("local", "never"), ("torch",)))
    for (weights, committed, undone), (waited, *_), (torchs, *_) in zip(always, never, theirs, strict=True):
        assert weights == waited and committed > 0 == undone
        for one, other in zip(weights, torchs, strict=True):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-5, atol=1e-6)
