"""Megatron's ``HybridDeviceOptimizer`` steps, saves and resumes with ``CPUAdamW``; its streams are stubs here."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import superoffload
from superoffload.errors import ArgumentError, StateError, UnknownArgument
from superoffload.integrations import megatron as adapter
from tests.support.adamw_training import (
    assert_close_to_torch,
    assert_worker_threads,
    worker_threads,
    worker_threads_when,
)
from tests.support.hybrid_device import hybrid, megatron, parameters, set_gradients, without_streams
from tests.support.optional_packages import needs

pytestmark = needs("megatron")

SHAPES = [(33, 70), (5,), (), (1500,), (64, 64)]
FP32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(scope="module", autouse=True)
def _disabled_at_the_end() -> Iterator[None]:
    yield
    adapter.disable()


@pytest.fixture(autouse=True)
def _enabled() -> Iterator[None]:
    """At once where the test before has left it enabled."""
    with without_streams():
        megatron("megatron.core.optimizer")
        adapter.enable(threads=2)
        yield


def ours() -> type:
    found: type = megatron("megatron.core.optimizer").CPUAdam
    assert issubclass(found, superoffload.CPUAdamW)
    return found


def groups(params: list[Any]) -> list[dict[str, Any]]:
    """With what Megatron keeps in its groups."""
    return [
        {"params": params[:2], "lr": 1e-3, "wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False},
        {"params": params[2:], "lr": 3e-3, "weight_decay": 0.0, "wd_mult": 0.0, "max_lr": 3e-3, "min_lr": 0.0},
    ]


def train(optimizer: Any, params: list[Any], steps: range) -> float:
    """Steps with a schedule of learning rates; returns the sum of the larger ones."""
    total = 0.0
    for step in steps:
        set_gradients(params, step)
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 + step % 3)
        total += 3e-3
        optimizer.step()
        optimizer.zero_grad()
    return total


def copy_values(params: list[Any], values: list[Any]) -> None:
    with torch.no_grad():
        for param, value in zip(params, values, strict=True):
            param.copy_(value)


# ---- steps ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overlap", "dtype", "fraction", "fused"), [(True, BF16, 1.0, True), (False, FP32, 0.5, False)]
)
def test_it_steps_as_with_torchs_class(overlap: bool, dtype: torch.dtype, fraction: float, fused: bool) -> None:
    """With ``fraction`` 0.5 the rest is stepped by the GPU's optimizer, which is torch's in both."""
    results = []
    for cpu_class in (ours(), torch.optim.AdamW):
        params = parameters(SHAPES, dtype)
        options = {"overlap_cpu_optimizer_d2h_h2d": overlap, "offload_fraction": fraction, "fused": fused}
        optimizer = hybrid(cpu_class, groups(params), **options)
        assert any(isinstance(one, cpu_class) for one in optimizer.cpu_optimizers)
        total = train(optimizer, params, range(12))
        results.append((params, optimizer))
    (mine, by_us), (theirs, by_torch) = results
    for a, b in zip(mine, theirs, strict=True):
        state, peer = by_us.state[a], by_torch.state[b]
        assert list(state) == list(peer) == ["step", "exp_avg", "exp_avg_sq", "master_param"]
        assert [one.dtype for one in state.values()] == [one.dtype for one in peer.values()]
        assert float(state["step"]) == float(peer["step"]) == 12.0
        assert_close_to_torch(state["master_param"], peer["master_param"], total)
        torch.testing.assert_close(state["exp_avg"], peer["exp_avg"], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(state["exp_avg_sq"], peer["exp_avg_sq"], rtol=1e-5, atol=1e-9)
        assert torch.equal(a, state["master_param"].to(dtype))


def test_many_parameters_and_the_threads_of_one_optimizer() -> None:
    gc.collect()  # threads of the tests before
    before = set(worker_threads())
    params = parameters([(10,)] * 40, BF16)
    optimizer = hybrid(ours(), [{"params": params}])
    assert len(optimizer.cpu_optimizers) == 40
    train(optimizer, params, range(2))
    worker_threads_when(len(before) + 1)
    optimizer.load_state_dict(optimizer.state_dict())  # makes all of them anew
    train(optimizer, params, range(2, 3))
    worker_threads_when(len(before) + 1)
    del optimizer, params
    gc.collect()
    assert_worker_threads(before)


# ---- checkpoints ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("overlap", "dtype"), [(False, FP32), (True, BF16)])
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(overlap: bool, dtype: torch.dtype) -> None:
    fp32 = dtype is BF16
    options = {"overlap_cpu_optimizer_d2h_h2d": overlap, "param_update_in_fp32": fp32}
    whole = parameters(SHAPES, dtype)
    never_stopped = hybrid(ours(), groups(whole), **options)
    train(never_stopped, whole, range(4))
    file = io.BytesIO()
    torch.save({"optimizer": never_stopped.state_dict(), "model": [p.detach() for p in whole]}, file)
    train(never_stopped, whole, range(4, 9))

    file.seek(0)
    saved = torch.load(file, weights_only=False)
    params = parameters(SHAPES, dtype, seed=1)
    resumed = hybrid(ours(), groups(params), **options)
    copy_values(params, saved["model"])
    if fp32:
        resumed.dummy_step()  # as Megatron's DistributedOptimizer does before it loads
        copy_values(params, saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    train(resumed, params, range(4, 9))
    for mine, theirs in zip(params, whole, strict=True):
        assert torch.equal(mine, theirs)
        assert all(torch.equal(value, never_stopped.state[theirs][name]) for name, value in resumed.state[mine].items())


@pytest.mark.parametrize("from_torch", [True, False])
def test_checkpoints_go_between_torchs_class_and_ours(from_torch: bool) -> None:
    classes = (torch.optim.AdamW, ours()) if from_torch else (ours(), torch.optim.AdamW)
    first, second = (parameters(SHAPES, FP32) for _ in range(2))
    saver, loader = (
        hybrid(one, groups(params), param_update_in_fp32=False)
        for one, params in zip(classes, (first, second), strict=True)
    )
    total = train(saver, first, range(4))
    copy_values(second, first)
    loader.load_state_dict(copy.deepcopy(saver.state_dict()))
    for params, optimizer in ((first, saver), (second, loader)):
        more = train(optimizer, params, range(4, 7))
    for a, b in zip(first, second, strict=True):
        assert float(loader.state[b]["step"]) == 7.0
        assert_close_to_torch(a.detach(), b.detach(), total + more)


def test_the_number_of_steps_that_megatrons_distributed_optimizer_saves_and_loads() -> None:
    """With Apex or Transformer Engine it asks only optimizers that are a ``torch.optim.AdamW``; without, all of them,
    and it loads one step for the state of all parameters."""
    params = parameters(SHAPES, FP32)
    optimizer = hybrid(ours(), groups(params), param_update_in_fp32=False, overlap_cpu_optimizer_d2h_h2d=False)
    train(optimizer, params, range(3))
    module = megatron("megatron.core.optimizer.distrib_optimizer")
    for with_apex_or_te in (True, False):
        with mock.patch.object(module, "HAVE_APEX_OR_TE", with_apex_or_te):
            saved = module.DistributedOptimizer.state_dict(SimpleNamespace(optimizer=optimizer, grad_scaler=None))
        assert [group["step"] for group in saved["optimizer"]["param_groups"]] == [3, 3]
    state = optimizer.state_dict()
    for values in state["state"].values():
        values["step"] = state["state"][0]["step"]
    optimizer.load_state_dict(state)
    train(optimizer, params, range(3, 5))
    assert [float(optimizer.state[p]["step"]) for p in params] == [5.0] * len(params)


# ---- enable and disable -----------------------------------------------------------------------------------------


def refuses_to_enable(error: type[Exception], words: str, **options: Any) -> None:
    with pytest.raises(error, match=words):
        adapter.enable(**options)
    assert not adapter.is_enabled()


def test_enable_and_disable() -> None:
    theirs = megatron("megatron.core.optimizer")
    adapter.enable(threads=2)
    assert adapter.is_enabled() and theirs.CPUAdam is adapter.HybridCPUAdamW
    with pytest.raises(StateError, match=r"threads=3.*already with threads=2"):
        adapter.enable(threads=3)
    with mock.patch.object(theirs, "CPUAdam", torch.optim.Adam):  # another package's, in our place
        adapter.disable()
        refuses_to_enable(StateError, r"CPUAdam is .*Adam.*expected torch\.optim\.AdamW")
        assert theirs.CPUAdam is torch.optim.Adam
    theirs.CPUAdam = torch.optim.AdamW  # mock has put ours back
    adapter.enable()
    adapter.disable()
    adapter.disable()
    refuses_to_enable(ArgumentError, "threads=0", threads=0)
    for version in ("0.14.0", "0.17.0", "1.0.0rc1", "core_v0.16.1"):
        with mock.patch("megatron.core.__version__", version):
            refuses_to_enable(ArgumentError, f"megatron-core {version}")
    missing = ModuleNotFoundError("No module named 'megatron'", name="megatron")
    with mock.patch("superoffload.integrations.megatron.import_module", side_effect=missing):
        refuses_to_enable(ArgumentError, "pip install 'megatron-core==")
    existing = hybrid(torch.optim.AdamW, groups(parameters(SHAPES, FP32)))
    refuses_to_enable(StateError, r"exists already.*before get_megatron_optimizer")
    assert theirs.CPUAdam is torch.optim.AdamW
    del existing  # in time for the next test


# ---- what is refused --------------------------------------------------------------------------------------------


def test_options_that_are_refused() -> None:
    """Among them bf16 that is not updated in fp32: Megatron's class would load state rounded to bf16."""
    params = parameters(SHAPES, FP32)
    with pytest.raises(ArgumentError, match=r"param_update_in_fp32=False with a torch\.bfloat16 parameter"):
        hybrid(ours(), groups(parameters(SHAPES, BF16)), param_update_in_fp32=False)
    with pytest.raises(UnknownArgument, match="amsgrad=True"):
        hybrid(ours(), groups(params), amsgrad=True)
    refused = r"bias_correction=False.*always corrected"
    for overlap in (True, False):
        with pytest.raises(ArgumentError, match=refused):
            hybrid(ours(), groups(params), overlap_cpu_optimizer_d2h_h2d=overlap, bias_correction=False)
        optimizer = hybrid(ours(), groups(params), overlap_cpu_optimizer_d2h_h2d=overlap)
        for group in optimizer.param_groups:
            group["bias_correction"] = False
        with pytest.raises(ArgumentError, match=refused):
            train(optimizer, params, range(1))
