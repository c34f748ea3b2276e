"""An optimizer that sleeps gives its memory back, and wakes with the bits of one that never slept."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from superoffload import AdamW, checkpoints
from superoffload.errors import HostMemoryError, StateError
from superoffload.host.memory import give_free_memory_back, refused
from tests.support.adamw_training import batch, model_of


def optimizer_of(model: nn.Module, **options: Any) -> AdamW:
    """Two groups, and buckets that cut parameters."""
    params = list(model.parameters())
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 1e-2}]
    return AdamW(groups, **{"threads": 2, "bucket_numel": 1024, "speculation": "always", **options})


def steps(model: nn.Module, optimizer: AdamW, count: int) -> None:
    for seed in range(count):
        optimizer.zero_grad()
        with optimizer.accumulate():
            batch(model, 100 + seed).backward()
        batch(model, seed).backward()
        optimizer.step()


@pytest.fixture
def trained() -> Iterator[tuple[nn.Module, AdamW]]:
    model = model_of(torch.bfloat16)
    with optimizer_of(model, master_dtype="split", state_dtype="8bit") as optimizer:
        steps(model, optimizer, count=2)
        yield model, optimizer


@contextmanager
def asleep(optimizer: AdamW, sleeps: bool) -> Iterator[None]:
    if sleeps:
        optimizer.sleep()
    yield
    if sleeps:
        optimizer.wake()


def a_gradient_arrives(model: nn.Module, optimizer: AdamW, sleeps: bool) -> None:
    optimizer.zero_grad()
    with asleep(optimizer, sleeps):
        before = optimizer.stats()["host_bytes"]
        batch(model, 9).backward()
        assert not sleeps or optimizer.stats()["host_bytes"] == before
    optimizer.step()


def a_parameter_is_written(model: nn.Module, optimizer: AdamW, sleeps: bool) -> None:
    weight, other, *_ = model.parameters()
    with asleep(optimizer, sleeps), torch.no_grad():
        weight[1] = 0.25
        other.data[1] = 0.25
    assert not sleeps or all(optimizer.state[param]["master"][1].eq(0.25).all() for param in (weight, other))


def parameters_move_away(model: nn.Module, optimizer: AdamW, sleeps: bool) -> None:
    """Masters keep the bits that bf16 parameters lack."""
    with asleep(optimizer, sleeps):
        kept = [param.data.clone() for param in model.parameters()]
        for param in model.parameters():
            param.data = torch.empty(0, dtype=param.dtype)
        if sleeps:
            with pytest.raises(StateError, match=r"its memory was freed.*to wake it give the parameter back"):
                optimizer.wake()
        for param, values in zip(model.parameters(), kept, strict=True):
            param.data = values


@pytest.mark.filterwarnings("ignore:superoffload. .* changed without autograd's version counters")
@pytest.mark.parametrize(
    ("meanwhile", "master_dtype"),
    [
        (a_gradient_arrives, "split"),
        (a_parameter_is_written, "split"),
        (a_parameter_is_written, "fp32"),
        (parameters_move_away, "fp32"),
        (parameters_move_away, "split"),
    ],
)
def test_it_goes_on_as_if_it_had_been_awake(
    meanwhile: Callable[[nn.Module, AdamW, bool], None], master_dtype: str
) -> None:
    found = []
    for sleeps in (False, True):
        model = model_of(torch.bfloat16)
        with optimizer_of(model, master_dtype=master_dtype) as optimizer:
            steps(model, optimizer, count=3)
            meanwhile(model, optimizer, sleeps)
            steps(model, optimizer, count=2)
            found.append(optimizer.state_digests())
    assert found[0] == found[1]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_the_system_gets_the_memory_back_each_time() -> None:
    options: dict[str, Any] = {"master_dtype": "split", "state_dtype": "bf16"}
    model = nn.ParameterList([nn.Parameter(torch.ones(1 << 21, dtype=torch.bfloat16)) for _ in range(4)])
    numel = 1 << 23
    with AdamW(model.parameters(), threads=2, speculation="always", **options) as optimizer:
        asleep: list[int] = []
        of_buckets = []  # bytes given back in each round
        for _ in range(5):
            for param in model:
                param.grad = torch.full_like(param, 0.5)
            optimizer.step()
            optimizer.zero_grad()
            give_free_memory_back()  # what the gradients were in
            awake = resident_bytes()
            optimizer.sleep()
            asleep.append(resident_bytes())
            of_buckets.append(awake - asleep[-1])
            assert optimizer.stats()["journal_reserved_bytes"] == 0
            assert 8 * numel <= optimizer.stats()["host_bytes"] < 8.1 * numel
            optimizer.wake()
    # The system moves pages of its own accord (khugepaged fills huge pages), so a single round may be off.
    assert median(of_buckets) > 2 * numel, of_buckets  # packed gradients, shadows and journals, at least
    assert min(asleep[-2:]) - asleep[1] < numel  # a leak of a byte per parameter would show


def test_calls_while_asleep(tmp_path: Path, trained: tuple[nn.Module, AdamW]) -> None:
    model, optimizer = trained
    digests, state = optimizer.state_digests(), optimizer.state_dict()
    checkpoints.save(tmp_path / "awake", model, optimizer)
    optimizer.sleep()
    optimizer.sleep()
    writes: list[Callable[[], Any]] = [
        optimizer.step,
        optimizer.refresh_masters,
        lambda: optimizer.load_state_dict(state),
        lambda: optimizer.load_masters([]),
        lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]}),
        lambda: checkpoints.load(tmp_path / "awake", model, optimizer),
    ]
    for call in writes:
        with pytest.raises(StateError, match=r"asleep since sleep\(\); call wake\(\) first"):
            call()
    reads: list[Callable[[], Any]] = [
        optimizer.state_digests,
        optimizer.state_dict,
        lambda: checkpoints.save(tmp_path / "a", model, optimizer),
        lambda: checkpoints.save_in_background(tmp_path / "b", model, optimizer).wait(60),
        lambda: checkpoints.export_weights(tmp_path / "c", model, optimizer),
    ]
    for call in reads:
        call()
    optimizer.synchronize()
    optimizer.zero_grad()
    optimizer.max_grad_norm = 1.0
    assert optimizer.stats()["steps"] == 2
    optimizer.wake()
    optimizer.wake()
    assert optimizer.state_digests() == digests and str(optimizer.state_dict()) == str(state)
    optimizer.sleep()
    optimizer.close()
    assert optimizer.state_digests() == digests
    for call in (optimizer.wake, optimizer.sleep):
        with pytest.raises(StateError, match="closed"):
            call()


def test_gradients_that_wait_are_not_lost(trained: tuple[nn.Module, AdamW]) -> None:
    model, optimizer = trained
    batch(model, 0).backward()
    with pytest.raises(StateError, match=r"gradients of this step .* call step\(\) first, or zero_grad\(\)"):
        optimizer.sleep()
    optimizer.step()  # it is awake
    assert optimizer.stats()["steps"] == 3


def test_without_memory_it_stays_asleep(trained: tuple[nn.Module, AdamW]) -> None:
    _, optimizer = trained
    digests = optimizer.state_digests()
    optimizer.sleep()
    no_memory = mock.patch("superoffload.engine.layout.shared_journals", side_effect=refused(1 << 30, "a test"))
    with no_memory, pytest.raises(HostMemoryError, match="still asleep; to wake it free memory"):
        optimizer.wake()
    with pytest.raises(StateError, match="asleep"):
        optimizer.step()
    optimizer.wake()
    assert optimizer.state_digests() == digests
