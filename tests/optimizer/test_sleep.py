"""An optimizer that sleeps gives its memory back, and wakes with the bits of one that never slept."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
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
from tests.support.adamw_training import Mixed, batch, model_of
from tests.support.resident_link import accelerator
from tests.support.sleepers import optimizer_of, resident_bytes, steps

SETTINGS: dict[str, dict[str, Any]] = {
    "always": {"speculation": "always"},
    "adaptive": {"speculation": "adaptive", "max_grad_norm": 0.05},
    "never": {"speculation": "never", "max_grad_norm": 0.05},
    "replay": {"speculation": "always", "max_grad_norm": 0.05},
    "bf16 moments": {"state_dtype": "bf16", "speculation": "always", "max_grad_norm": 0.5},
    "8bit moments": {"state_dtype": "8bit", "speculation": "always"},
    "split": {"master_dtype": "split", "speculation": "always", "max_grad_norm": 0.5},
    "split, never": {"master_dtype": "split", "speculation": "never"},
    "split, 8bit": {"master_dtype": "split", "state_dtype": "8bit", "max_grad_norm": 0.05},
    "fp32 sums": {"accumulate_dtype": "fp32"},
    "two phases": {"speculation": "adaptive", "max_grad_norm": 1e-4},
}


def nap(optimizer: AdamW, folder: Path | None = None, *, sleeps: bool = True) -> None:
    if sleeps:
        optimizer.sleep(folder)
        optimizer.wake()


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    if not isinstance(model, Mixed):
        return batch(model, seed)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
    return torch.as_tensor(model(x).square().mean())


@pytest.fixture(params=["memory", "disk"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    """Where masters and moments are while the optimizer sleeps; None: in memory."""
    return tmp_path if request.param == "disk" else None


# ---- the same bits --------------------------------------------------------------------------------------------------


MODELS: dict[str, Callable[[], nn.Module]] = {
    "fp32": model_of,
    "bf16": lambda: model_of(torch.bfloat16),
    "mixed": Mixed,
}
# Each setting once, and with it one of the models and one of the places where the state is meanwhile.
CASES = [
    ("always", "fp32", "disk"),
    ("adaptive", "mixed", "memory"),
    ("never", "bf16", "disk"),
    ("replay", "bf16", "memory"),
    ("bf16 moments", "mixed", "disk"),
    ("8bit moments", "fp32", "memory"),
    ("split", "mixed", "disk"),
    ("split, never", "bf16", "memory"),
    ("split, 8bit", "bf16", "disk"),
    ("fp32 sums", "bf16", "memory"),
    ("two phases", "fp32", "memory"),
]


@pytest.mark.parametrize(("setting", "kind", "where"), CASES)
def test_same_bits_as_one_that_never_slept(setting: str, kind: str, where: str, tmp_path: Path) -> None:
    """Also in an accumulation window, unless it says that gradients wait."""
    found = []
    for sleeps in (False, True):
        model = MODELS[kind]()
        with optimizer_of(model, **SETTINGS[setting]) as optimizer:
            steps(model, optimizer, partial(nap, optimizer, tmp_path if where == "disk" else None, sleeps=sleeps))
            for seed in range(2):
                optimizer.zero_grad()
                with optimizer.accumulate():
                    loss_of(model, 100 + seed).backward()
                    try:
                        nap(optimizer, None, sleeps=sleeps)
                    except StateError as error:
                        assert "gradients of this step have arrived and wait for step()" in str(error)
                loss_of(model, seed).backward()
                optimizer.step()
            found.append((optimizer.state_digests(), optimizer.grad_norm, optimizer.stats()["skipped_steps"]))
    assert found[0] == found[1]


@pytest.mark.parametrize("setting", ["always", "split, 8bit", "two phases"])
def test_generation_while_asleep_reads_the_new_parameters(setting: str, folder: Path | None) -> None:
    """On demand, sleep() delivers what readers still waited for."""
    found = []
    for delivery in ("eager", "on_demand"):
        model = model_of(torch.bfloat16)
        outputs: list[Any] = []
        with optimizer_of(model, module=model, delivery=delivery, **SETTINGS[setting]) as optimizer:

            def generate(one: AdamW = optimizer, shown: nn.Module = model, found: list[Any] = outputs) -> None:
                one.sleep(folder)
                with torch.no_grad():
                    found.append(shown(torch.ones(2, 16, dtype=torch.bfloat16)).tolist())
                one.wake()

            steps(model, optimizer, generate)
            found.append((outputs, optimizer.state_digests()))
    assert str(found[0]) == str(found[1])
    assert found[0][0][0] != found[0][0][1]


def test_state_on_an_accelerator_goes_down_and_returns(folder: Path | None) -> None:
    found = []
    for sleeps in (False, True):
        with accelerator():
            model = model_of(torch.bfloat16)
            options: dict[str, Any] = {"placement": {"gpu_fraction": 0.5}, "master_dtype": "split"}
            with optimizer_of(model, speculation="always", **options) as optimizer:
                steps(model, optimizer)
                before = optimizer.stats()["params_on_device"]
                assert before > 0
                if sleeps:
                    optimizer.sleep(folder)
                    assert optimizer.stats()["params_on_device"] == 0
                    optimizer.wake()
                    shards = optimizer._engine.shards
                    memory = [one.exp_avg.untyped_storage() for one in shards if not one.resident]
                    held = sum({one.data_ptr(): one.nbytes() for one in memory}.values())
                    assert held < sum(one.exp_avg.nbytes for one in shards), "that of the others was given back"
                steps(model, optimizer)
                assert optimizer.stats()["params_on_device"] == before
                found.append(optimizer.state_digests())
    assert found[0] == found[1]


# ---- the memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("master_dtype", ["fp32", "split"])
def test_buckets_are_freed_and_stats_show_what_is_held(master_dtype: str) -> None:
    model = model_of(torch.bfloat16)
    numel = sum(param.numel() for param in model.parameters())
    with optimizer_of(model, speculation="always", master_dtype=master_dtype) as optimizer:
        steps(model, optimizer, count=2)
        awake = optimizer.stats()
        buckets = [weakref.ref(bucket) for bucket in optimizer._engine.buckets]
        optimizer.sleep()
        gc.collect()
        assert buckets
        assert not any(bucket() for bucket in buckets)
        asleep = optimizer.stats()
        sums = sum(shard.block_sums.nbytes for shard in optimizer._engine.shards)
        assert asleep["host_bytes"] == 12 * numel + sums < awake["host_bytes"]
        assert asleep["journal_reserved_bytes"] == 0 < awake["journal_reserved_bytes"]
        optimizer.wake()
        assert optimizer.stats()["host_bytes"] >= awake["host_bytes"] - awake["journal_reserved_bytes"]


# Bytes of a parameter's packed gradient, shadow and journal, at least, and of its master and moments.
MEMORY: list[tuple[dict[str, Any], int, int]] = [
    ({}, 4, 12),
    ({"master_dtype": "split", "state_dtype": "bf16"}, 2, 8),
]


@pytest.mark.parametrize(("options", "buckets", "state"), MEMORY)
def test_the_system_gets_the_memory_back_each_time(
    options: dict[str, Any], buckets: int, state: int, tmp_path: Path
) -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(1 << 21, dtype=torch.bfloat16)) for _ in range(4)])
    numel = 1 << 23
    with AdamW(model.parameters(), threads=2, speculation="always", **options) as optimizer:
        asleep: list[int] = []
        of_buckets, of_state = [], []  # bytes given back in each round
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
            counted = optimizer.stats()["host_bytes"]
            optimizer.sleep(tmp_path)
            of_state.append(asleep[-1] - resident_bytes())
            assert counted - optimizer.stats()["host_bytes"] == state * numel
            assert not any(tmp_path.iterdir()), "the file has no name, so that nothing is left if the process dies"
            optimizer.wake()
    # The system moves pages of its own accord (khugepaged fills huge pages), so a single round may be off.
    assert median(of_buckets) > buckets * numel, of_buckets
    assert median(of_state) > (state - 0.5) * numel, of_state
    assert min(asleep[-2:]) - asleep[1] < numel  # a leak of a byte per parameter would show


# ---- calls ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("speculation", ["always", "adaptive"])
def test_gradients_that_wait_for_step_refuse_it(speculation: str) -> None:
    model = model_of()
    with optimizer_of(model, speculation=speculation) as optimizer, optimizer_of(model_of()) as other:
        steps(model, optimizer, count=2)
        before = optimizer.state_digests()
        batch(model, 1).backward()
        with pytest.raises(StateError, match=r"sleep\(\): gradients .* call step\(\) first, or zero_grad\(\)"):
            optimizer.sleep()
        optimizer.zero_grad()
        optimizer.sleep()
        optimizer.wake()
        assert optimizer.state_digests() == before
        other.sleep()


def test_calls_while_asleep(tmp_path: Path) -> None:
    model = model_of()
    with optimizer_of(model) as optimizer:
        steps(model, optimizer, count=2)
        digests, state = optimizer.state_digests(), optimizer.state_dict()
        optimizer.sleep()
        optimizer.sleep()
        refused_calls: list[Callable[[], Any]] = [
            optimizer.step,
            optimizer.refresh_masters,
            lambda: optimizer.load_state_dict(state),
            lambda: optimizer.load_masters([]),
            lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]}),
            lambda: checkpoints.load(tmp_path / "none", model, optimizer),
        ]
        for call in refused_calls[:5]:
            with pytest.raises(StateError, match=r"asleep since sleep\(\); call wake\(\) first"):
                call()
        optimizer.synchronize()
        optimizer.zero_grad()
        optimizer.max_grad_norm = 1.0
        assert optimizer.state_digests() == digests
        assert str(optimizer.state_dict()) == str(state)
        saved = tmp_path / "asleep"
        checkpoints.save(saved, model, optimizer)
        with pytest.raises(StateError, match=r"call wake\(\) first"):
            checkpoints.load(saved, model, optimizer)
        optimizer.wake()
        optimizer.wake()
        assert optimizer.state_digests() == digests
        checkpoints.load(saved, model, optimizer)
        assert optimizer.state_digests() == digests
        optimizer.sleep()
    assert optimizer.state_digests() == digests  # closed
    for call in (optimizer.wake, optimizer.sleep):
        with pytest.raises(StateError, match="closed"):
            call()


# ---- meanwhile ------------------------------------------------------------------------------------------------------


@contextmanager
def asleep(optimizer: AdamW, folder: Path | None, sleeps: bool) -> Iterator[None]:
    if sleeps:
        optimizer.sleep(folder)
    yield
    if sleeps:
        optimizer.wake()


def a_gradient_arrives(model: nn.Module, optimizer: AdamW, folder: Path | None, sleeps: bool) -> None:
    optimizer.zero_grad()
    with asleep(optimizer, folder, sleeps):
        before = optimizer.stats()["host_bytes"]
        batch(model, 9).backward()
        if sleeps:
            assert optimizer.stats()["host_bytes"] == before and not optimizer._engine.is_filling
    optimizer.step()


def a_parameter_is_written(model: nn.Module, optimizer: AdamW, folder: Path | None, sleeps: bool) -> None:
    weight, other, *_ = model.parameters()
    with asleep(optimizer, folder, sleeps), torch.no_grad():
        weight[1] = 0.25
        other.data[1] = 0.25
    if sleeps:
        assert all(optimizer.state[param]["master"][1].eq(0.25).all() for param in (weight, other))


def parameters_move_away(model: nn.Module, optimizer: AdamW, folder: Path | None, sleeps: bool) -> None:
    """Masters keep the bits that bf16 parameters lack."""
    with asleep(optimizer, folder, sleeps):
        kept = [param.data.clone() for param in model.parameters()]
        for param in model.parameters():
            param.data = torch.empty(0, dtype=param.dtype)
        if sleeps:
            with pytest.raises(StateError, match=r"its memory was freed.*to wake it give the parameter back"):
                optimizer.wake()
        for param, values in zip(model.parameters(), kept, strict=True):
            param.data = values


def memory_is_refused(model: nn.Module, optimizer: AdamW, folder: Path | None, sleeps: bool) -> None:
    """Where wake() brings the state to memory first, it stays there."""
    with asleep(optimizer, None, sleeps):
        before = optimizer.stats()["host_bytes"]
        if sleeps:
            optimizer.sleep(folder)
            refusal = mock.patch("superoffload.engine.layout.shared_journals", side_effect=refused(1 << 30, "a test"))
            with refusal, pytest.raises(HostMemoryError, match=r"wake\(\): .*still asleep"):
                optimizer.wake()
            assert optimizer.stats()["host_bytes"] == before
            with pytest.raises(StateError, match="asleep"):
                optimizer.step()


MEANWHILE = [a_gradient_arrives, a_parameter_is_written, parameters_move_away, memory_is_refused]


@pytest.mark.filterwarnings("ignore:superoffload. .* changed without autograd's version counters")
@pytest.mark.parametrize("master_dtype", ["fp32", "split"])
@pytest.mark.parametrize("meanwhile", MEANWHILE)
def test_it_goes_on_as_if_it_had_been_awake(
    meanwhile: Callable[[nn.Module, AdamW, Path | None, bool], None], master_dtype: str, folder: Path | None
) -> None:
    found = []
    for sleeps in (False, True):
        model = model_of(torch.bfloat16)
        with optimizer_of(model, speculation="always", master_dtype=master_dtype) as optimizer:
            steps(model, optimizer, count=3)
            meanwhile(model, optimizer, folder, sleeps)
            steps(model, optimizer, count=2)
            found.append(optimizer.state_digests())
    assert found[0] == found[1]
