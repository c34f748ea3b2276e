"""AdamW with master_dtype="split": the bits do not depend on the schedule, and are those of whole masters."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW
from superoffload.engine.speculation_schedule import Schedule
from superoffload.errors import ArgumentError
from tests.support.adamw_training import (
    Mixed,
    Reordered,
    assert_worker_threads,
    batch,
    check_counters,
    model_of,
    worker_threads,
)
from tests.support.link_runs import wide_model
from tests.support.split_masters import SPLIT, assert_split, shard_of

# The schedule, and the share of what was not speculated that is published first and settled later.
WAYS = {"never": ("never", 0.0), "always": ("always", 0.0), "adaptive": ("adaptive", 0.0), "two": ("always", 1.0)}
Look = Callable[[AdamW], None]


def small_model() -> nn.Module:
    return model_of(torch.bfloat16)


def in_several_buckets() -> nn.Module:
    return wide_model(torch.bfloat16)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "small": small_model,
    "larger than a bucket": in_several_buckets,
    "mixed": Mixed,
    "reordered": Reordered,
}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    first, *rest = model.parameters()
    return [{"params": [first], "lr": 3e-3, "weight_decay": 0.1}, {"params": rest, "betas": (0.8, 0.99)}]


@contextmanager
def made(model: nn.Module, way: str, **options: Any) -> Iterator[AdamW]:
    """An optimizer that speculates, publishes and settles in this way."""
    mode, share = WAYS[way]
    if options.get("delivery") == "on_demand":
        options["module"] = model
    options = {"lr": 1e-2, "threads": 2, "bucket_numel": 1024, **SPLIT, **options}
    with (
        mock.patch.object(Schedule, "share_to_publish", lambda *_: share),
        AdamW(groups_of(model), speculation=mode, **options) as optimizer,
    ):
        yield optimizer
    check_counters(optimizer)


def backward(model: nn.Module, seed: int, last: float = 1.0) -> None:
    """``last`` multiplies the gradient that comes last, once all others may have been speculated."""
    first = next(model.parameters())
    handle = first.register_hook(lambda gradient: gradient * last)
    generator = torch.Generator().manual_seed(seed)
    model(torch.randn(8, 16, generator=generator).to(first.dtype)).float().square().mean().backward()
    handle.remove()


def every_fate(model: nn.Module, optimizer: AdamW, look: Look) -> None:
    """Committed, clipped early and late, skipped, abandoned, accumulated, added to, and with another lr in the end."""
    for step in range(14):
        optimizer.zero_grad()
        optimizer.max_grad_norm = 0.05 if step in (6, 7) else None
        if step == 5:
            with optimizer.accumulate():
                backward(model, 100)
        backward(model, step, {3: torch.nan, 9: torch.inf}.get(step, 1.0))
        if step == 4:
            backward(model, 200)
        elif step == 8:
            continue
        elif step == 10:
            optimizer.param_groups[0]["lr"] = 2e-2
        elif step in (2, 12):
            optimizer.max_grad_norm = 0.1
        elif step == 11:
            next(model.parameters()).grad = None
        optimizer.step()
        look(optimizer)


def delivered_and_split(optimizer: AdamW) -> None:
    optimizer.synchronize()
    assert_split(optimizer)


def check_ways(make: Callable[[], nn.Module], **options: Any) -> dict[str, dict[str, float | int]]:
    """Digests are those of the run that waits, in every way, looked at after each step or not; returns the counters."""
    digests, stats = {}, {}
    for way in WAYS:
        model = make()
        with made(model, way, **options) as optimizer:
            every_fate(model, optimizer, delivered_and_split if way in ("never", "always") else lambda _: None)
            digests[way] = optimizer.state_digests()
            delivered_and_split(optimizer)
            stats[way] = optimizer.stats()
    assert all(found == digests["never"] for found in digests.values())
    return stats


@pytest.mark.parametrize("delivery", ["eager", "on_demand"])
@pytest.mark.parametrize("model", MODELS)
def test_no_schedule_changes_a_bit(model: str, delivery: str) -> None:
    stats = check_ways(MODELS[model], delivery=delivery)
    always, two = stats["always"], stats["two"]
    assert always["skipped_steps"] == 2 and always["clipped_steps"] == 4
    for fate in ("committed", "replayed", "undone", "skipped", "abandoned", "stepped"):
        assert always[f"buckets_{fate}"] > 0, fate
    assert two["buckets_two_phase"] > 0 and two["buckets_speculated"] > 0
    assert stats["adaptive"]["buckets_speculated"] > 0 == stats["never"]["buckets_speculated"]


@pytest.mark.parametrize("options", [{"state_dtype": "bf16", "seed": 3}, {"accumulate_dtype": "fp32"}], ids=str)
def test_with_other_dtypes_of_moments_and_gradients(options: dict[str, Any]) -> None:
    assert check_ways(in_several_buckets, **options)["always"]["buckets_replayed"] > 0


@pytest.mark.parametrize("speculated", ["clipped", "skipped"])
def test_a_journal_that_overflows(speculated: str) -> None:
    """Learning rates that jump leave no room in it: the bucket is undone at once, halves included."""
    digests, overflows = [], 0
    for way in ("never", "always"):
        model = small_model()
        with made(model, way) as optimizer:
            for step in range(8):
                optimizer.zero_grad()
                for group in optimizer.param_groups:
                    group["betas"] = (0.0, 0.0)  # no old moment is recoverable from the new one
                backward(model, step, torch.nan if step == 5 and speculated == "skipped" else 1.0)
                if step == 5 and speculated == "clipped":
                    optimizer.max_grad_norm = 1e-3
                optimizer.step()
                assert_split(optimizer)
            overflows += int(optimizer.stats()["journal_overflows"])
            digests.append(optimizer.state_digests())
    assert digests[0] == digests[1] and overflows > 0


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16"])
def test_the_bits_of_whole_masters(state_dtype: str) -> None:
    """Where gradients do not depend on parameters, which differ from those of whole masters at ties."""
    found = []
    for master_dtype in ("split", "fp32"):
        model = in_several_buckets()
        with made(model, "always", master_dtype=master_dtype, state_dtype=state_dtype) as optimizer:
            for step in range(8):
                generator = torch.Generator().manual_seed(step)
                for param in model.parameters():
                    param.grad = torch.randn(param.shape, generator=generator).bfloat16()
                optimizer.max_grad_norm = 1.0 if step % 3 == 2 else None
                optimizer.step()
            digests = optimizer.state_digests()
            found.append([digests[name] for name in ("master", "exp_avg", "exp_avg_sq")])
            moments = {str(state["exp_avg"].dtype) for state in optimizer.state.values()}
            assert moments == {"torch.float32" if state_dtype == "fp32" else "torch.bfloat16"}
    assert found[0] == found[1]


def test_parameters_that_come_later_are_split_too() -> None:
    digests = []
    for way in ("never", "always"):
        model, more = small_model(), nn.Linear(4, 4).bfloat16()
        torch.manual_seed(1)
        nn.init.normal_(more.weight)
        nn.init.zeros_(more.bias)
        with made(model, way) as optimizer:
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


# ---- memory -----------------------------------------------------------------------------------------------------


def nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@pytest.mark.parametrize("steps", [0, 4])
def test_what_is_kept_of_each_parameter(steps: int) -> None:
    """2 bytes of remainder and 2 of shadow, which is the upper half: at first, and after buckets were made anew."""
    model = in_several_buckets()
    with made(model, "always", max_grad_norm=0.3) as optimizer:
        for step in range(steps):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
        engine = optimizer._engine
        assert engine.layout.observed == (steps > 0)
        shadows = {bucket.shadow.untyped_storage().data_ptr() for bucket in engine.buckets}
        for shard in engine.shards:
            assert shard.upper is not None
            assert [part.untyped_storage().data_ptr() in shadows for part in shard.upper.parts] == [True] * len(
                engine.layout.places_of(shard)
            )
            assert nbytes(shard.master) == 2 * shard.numel
        for bucket in engine.buckets:
            assert nbytes(bucket.shadow) == nbytes(bucket.gradient) == 2 * bucket.padded
        assert optimizer.stats()["journal_reserved_bytes"] <= sum(2 * b.padded + 1024 for b in engine.buckets)
        for state in optimizer.state.values():
            one, other = state["master"], state["master"]
            assert one.data_ptr() != other.data_ptr(), "copies, of which none is kept"


def test_copies_and_pickles_of_the_state_are_of_their_moment() -> None:
    model = small_model()
    with made(model, "always") as optimizer:
        backward(model, 0)
        optimizer.step()
        state = next(iter(optimizer.state.values()))
        then = {name: value.clone() for name, value in state.items()}
        shallow = {**copy.copy(state), "exp_avg": then["exp_avg"]}  # moments are the tensors that are stepped
        copies = [copy.deepcopy(state), pickle.loads(pickle.dumps(state)), shallow]
        optimizer.zero_grad()
        backward(model, 1)
        optimizer.step()
        assert not torch.equal(state["master"], then["master"])
        for one in copies:
            assert isinstance(one, dict) and set(one) == set(then)
            assert torch.equal(one["master"], then["master"]) and torch.equal(one["exp_avg"], then["exp_avg"])


def test_a_copy_that_is_put_back_is_not_kept() -> None:
    """Lightning moves every entry of the state to the device where it is."""
    model = small_model()
    with made(model, "always") as optimizer:
        for step in range(2):
            for state in optimizer.state.values():
                for name, value in state.items():
                    state[name] = value.to("cpu")
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
        assert_split(optimizer)


# ---- arguments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["half", None, "bf16", torch.bfloat16, 16, True, ["split"]], ids=str)
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"master_dtype=.*expected 'fp32', or 'split' to keep the masters of bf"):
        AdamW(small_model().parameters(), master_dtype=value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_without_a_parameter_to_split_it_is_refused(dtype: torch.dtype) -> None:
    model, threads = model_of(dtype), worker_threads()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ArgumentError, match=rf"master_dtype='split': .*\(0.weight is {dtype}\).*model.to\(torch.bfl"):
        AdamW(model.named_parameters(), **SPLIT)
    assert_worker_threads(set(threads))
    assert all(map(torch.equal, before, model.parameters()))
    with AdamW(model.parameters(), master_dtype=torch.float32, threads=1) as optimizer:
        batch(model, 0).backward()
        optimizer.step()
        assert optimizer.stats()["steps"] == 1


def test_no_parameters_are_what_is_refused_first() -> None:
    with pytest.raises(ValueError, match="params: empty; expected parameters to train"):
        AdamW([], **SPLIT)
