"""One DistributedDataParallel: several optimizers on it, one after the other, and ranks that run out of inputs."""

from __future__ import annotations

import gc
import warnings
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from superoffload import AdamW
from superoffload.integrations.ddp import DdpReductions
from tests.support.rank_processes import error_of, loss_of, net, on_ranks, wholes_of

OPTIONS: dict[str, Any] = {"lr": 3e-3, "threads": 1, "bucket_numel": 1024, "rank_timeout": 20.0}


def two_at_once(make: str) -> tuple[list[Tensor], list[int]]:
    """As a GAN has them: each steps its own part, and the second one in every other step only."""
    inner = net(torch.float32)
    model = DistributedDataParallel(inner, bucket_cap_mb=0.005)
    training = [p for p in inner.parameters() if p.requires_grad]
    optimizers: list[Any] = []
    for params, lr in ((training[:3], 3e-3), (training[3:], 1e-2)):
        if make == "torch":
            optimizers.append(torch.optim.AdamW(params, lr=lr))
        else:
            optimizers.append(AdamW(params, **{**OPTIONS, "lr": lr}, model=model, speculation=make))
    for seed in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, seed).backward()
        for optimizer in optimizers[: 1 + seed % 2]:
            optimizer.step()
    speculated = [int(one.stats()["buckets_speculated"]) for one in optimizers if make != "torch"]
    for optimizer in optimizers if make != "torch" else ():
        optimizer.close()
    return wholes_of(inner), speculated


def assert_close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_two_optimizers_step_parts_of_one_model() -> None:
    always, never, theirs = (on_ranks(2, two_at_once, make) for make in ("always", "never", "torch"))
    for (weights, speculated), (waited, _), (torchs, _) in zip(always, never, theirs, strict=True):
        assert all(map(torch.equal, weights, waited)) and min(speculated) > 0
        assert_close(weights, torchs)


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
            with mock.patch.object(DdpReductions, "begins", side_effect=AssertionError("it is closed")):
                loss_of(model, 51).backward()
        del optimizer
        gc.collect()
    loss_of(model, 0).backward()
    return found


def test_each_phase_gets_its_own_optimizer() -> None:
    for found in on_ranks(2, one_after_the_other):
        assert all(equal and speculated > 0 for equal, speculated in found)


PASSES = (2, 2, 1, 1, 3, 3)


def several_passes(speculation: str, told: bool, view: bool) -> tuple[list[Tensor], list[int]]:
    """Without ``no_sync()``: DDP reduces in each. Weights, and how many buckets were undone in each step."""
    inner = net(torch.float32)
    model = DistributedDataParallel(inner, bucket_cap_mb=0.005, gradient_as_bucket_view=view)
    undone = [0]
    with AdamW(model.parameters(), **OPTIONS, model=model, speculation=speculation) as optimizer:
        for step, passes in enumerate(PASSES):
            optimizer.zero_grad()
            for micro in range(passes):
                with optimizer.accumulate() if told and micro + 1 < passes else nullcontext():
                    loss_of(model, 10 * step + micro).backward()
            optimizer.step()
            undone.append(int(optimizer.stats()["buckets_undone"]))
        assert speculation == "never" or optimizer.stats()["buckets_committed"] > 0
    return wholes_of(inner), [after - before for before, after in pairwise(undone)]


@pytest.mark.parametrize("view", [True, False])
def test_only_the_last_pass_of_a_step_is_stepped_early(view: bool) -> None:
    outcomes = [
        on_ranks(2, several_passes, *how, view) for how in (("always", True), ("always", False), ("never", True))
    ]
    for (told, none), (untold, some), (waited, _) in zip(*outcomes, strict=True):
        assert all(map(torch.equal, told, waited)) and all(map(torch.equal, untold, waited))
        assert not any(none)
        assert [count > 0 for count in some] == [True, False, False, False, True, False], "as in the step before"


class Wrapper(DistributedDataParallel):
    """A framework's own class."""


class DerivedWrapper(Wrapper):
    """A program's class, derived from that."""


def said(words: str, folder: str, **options: Any) -> tuple[list[int], list[int]]:
    """How often these words are said in each step, and the speculated buckets. Without ``folder`` the program reduces
    gradients. Else DDP does, made later; before the sixth step it is saved whole, after it was found, and made anew."""
    inner = net(torch.float32)
    said, speculated = [], []
    with AdamW(inner.parameters(), **OPTIONS, **options) as ours:
        model: Any = DerivedWrapper(inner) if folder else inner
        for seed in range(8):
            if seed == 5 and folder:
                torch.save(model, f"{folder}/{dist.get_rank()}")
                model = DistributedDataParallel(inner)
            ours.zero_grad()
            loss_of(model, seed).backward()
            for param in inner.parameters():
                if not folder and param.grad is not None:
                    dist.all_reduce(param.grad)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                ours.step()
            said.append(sum(words in str(one.message) for one in caught))
            speculated.append(int(ours.stats()["buckets_speculated"]))
    return said, speculated


def test_where_nothing_can_be_stepped_early_the_first_rank_says_so_once() -> None:
    words = "speculation='never' ends this warning"
    (late, none), (other, _) = on_ranks(2, said, words, "")
    assert late == [1] + [0] * 7 and not any(none) and not any(other)
    assert not any(any(counts) for counts, _ in on_ranks(2, partial(said, speculation="never"), words, ""))


def without_gradients() -> list[int]:
    """How many warnings each step gives where another model is trained than the optimizer has."""
    counts = []
    with AdamW(net(torch.float32).parameters(), **OPTIONS) as ours:
        for _ in range(4):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                ours.step()
            counts.append(sum("nothing is trained" in str(one.message) for one in caught))
            assert len(caught) == counts[-1], [str(one.message) for one in caught]
    return counts


def test_parameters_without_gradients_are_not_said_to_be_right() -> None:
    assert on_ranks(2, without_gradients) == [[0, 0, 1, 0]] * 2


@pytest.mark.parametrize("replicated", ["replicate", "shard", "local"])
def test_ddp_that_is_made_later_is_followed_until_it_is_made_anew(replicated: str, tmp_path: Path) -> None:
    told = partial(said, speculation="always", replicated=replicated)
    for counts, speculated in on_ranks(2, told, "make a new optimizer for that", str(tmp_path)):
        assert speculated[0] == 0 or replicated == "local"  # taken there before DDP reduces, and undone
        assert speculated[0] < speculated[1] < speculated[4]
        assert replicated == "local" or (sum(counts), speculated[-1]) == (1, speculated[4])


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
        return wholes_of(inner), stats["buckets_committed"], stats["buckets_undone"]


def test_ranks_that_run_out_of_inputs_end_with_an_error_that_says_what_works() -> None:
    first, second = on_ranks(2, uneven, "replicate")
    assert first.startswith("RankError: ") and "rank 1 has no more inputs" in first
    assert second.startswith("StateError: ") and "this rank has no more inputs" in second
    for error in (first, second):
        assert "join()" in error and "replicated='local'" in error


def test_ranks_that_step_by_themselves_take_what_ddp_has_reduced_and_run_out_of_inputs_as_with_torch() -> None:
    always, never, theirs = (on_ranks(2, uneven, *how) for how in (("local", "always"), ("local", "never"), ("torch",)))
    for (weights, committed, undone), (waited, *_), (torchs, *_) in zip(always, never, theirs, strict=True):
        assert all(map(torch.equal, weights, waited)) and committed > 0 == undone
        assert_close(weights, torchs)
