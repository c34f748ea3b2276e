"""The kernels as a plain optimizer: equal to torch's within rounding, to superoffload.AdamW bit for bit."""

from __future__ import annotations

import copy
import pickle
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import superoffload
from superoffload import _native
from superoffload.errors import ArgumentError, StateError, WorkerError
from tests.support.adamw_training import assert_worker_threads, worker_threads, worker_threads_when
from tests.support.fp32_gradients import needs_grad_dtype


def parameters(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(33, 70), (5,), (), (0, 3), (1500,)]
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def set_gradients(params: list[torch.nn.Parameter], step: int, skip: int | None = None) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for i, param in enumerate(params):
        grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        param.grad = None if i == skip else grad


def bits(tensors: list[Tensor]) -> list[bytes]:
    return [tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]


@pytest.mark.parametrize(("l2", "maximize"), [(False, False), (True, True)])
def test_equals_torch_within_rounding(l2: bool, maximize: bool) -> None:
    mine, theirs = parameters(), parameters()
    ours = superoffload.CPUAdamW(mine, lr=1e-3, weight_decay=0.05, maximize=maximize, l2=l2, threads=2)
    peer_class = torch.optim.Adam if l2 else torch.optim.AdamW
    peer = peer_class(theirs, lr=1e-3, weight_decay=0.05, maximize=maximize)
    accumulated = 0.0
    for step in range(60):
        lr = 1e-3 * (1 + step % 7)
        accumulated += lr
        for optimizer, params in ((ours, mine), (peer, theirs)):
            optimizer.param_groups[0]["lr"] = lr
            set_gradients(params, step, skip=1 if step % 3 == 0 else None)
            optimizer.step()
    for a, b in zip(mine, theirs, strict=True):
        bound = 1e-6 * torch.clamp(b.detach().abs(), min=accumulated)
        assert bool(((a - b).abs() <= bound).all())
    assert [float(s["step"]) for s in ours.state.values()] == [float(s["step"]) for s in peer.state.values()]


@pytest.mark.parametrize(
    ("dtype", "state_dtype"), [(torch.float32, "bf16"), (torch.bfloat16, "fp32"), (torch.float16, "bf16")]
)
def test_equals_superoffload_adamw_bit_for_bit(dtype: torch.dtype, state_dtype: str) -> None:
    mine, theirs = parameters(dtype), parameters(dtype)
    plain = superoffload.CPUAdamW(mine, state_dtype=state_dtype, seed=3, threads=2)
    full = superoffload.AdamW(theirs, state_dtype=state_dtype, seed=3, bucket_numel=1024)
    for step in range(6):
        for params in (mine, theirs):  # those behind one without a gradient keep their noise
            set_gradients(params, step, skip=0 if step == 2 else None)
        assert plain.step(lambda: 2.5) == 2.5
        full.step()
    assert bits(list(mine)) == bits(list(theirs))
    for a, b in zip(mine, theirs, strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            assert bits([plain.state[a][name]]) == bits([full.state[b][name]])
        assert bits([plain.state[a].get("master", a)]) == bits([full.state[b]["master"]])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_a_copy_goes_on_where_it_was_taken(copied: Callable[[Any], Any]) -> None:
    """As torch's optimizers do; with moments whose rounding depends on the seed, and L2."""
    mine = parameters(torch.bfloat16)
    first = superoffload.CPUAdamW(mine, l2=True, state_dtype="bf16", seed=7, threads=1)
    set_gradients(mine, 0)
    first.step()
    second = copied(first)
    theirs = second.param_groups[0]["params"]
    for step in (1, 2):
        for optimizer, params in ((first, mine), (second, theirs)):
            set_gradients(params, step)
            optimizer.step()
    assert bits(list(mine)) == bits(theirs)
    for a, b in zip(first.state.values(), second.state.values(), strict=True):
        assert bits(list(a.values())) == bits(list(b.values()))
    first.close()
    set_gradients(theirs, 3)
    second.step()
    second.close()


class Later:
    """Work that begins once it is waited for, when memory that was freed has another owner."""

    def __init__(self, work: _native.BucketWork) -> None:
        self._work = work

    def wait(self) -> None:
        others = [torch.full((64, 64), float("nan")) for _ in range(16)]
        self._work.run_all(_native.Operation.step)
        del others


def test_gradients_that_are_not_contiguous_live_until_all_groups_are_stepped() -> None:
    """The kernels read a copy of each, which no other code has."""
    mine, theirs = ([torch.nn.Parameter(torch.ones(64, 64)) for _ in range(4)] for _ in range(2))
    ours = superoffload.CPUAdamW([{"params": [param]} for param in mine], threads=1)
    peer = torch.optim.AdamW(theirs)
    with mock.patch.object(ours._workers, "step", Later):
        for step in range(3):
            for params in (mine, theirs):
                generator = torch.Generator().manual_seed(step)
                for param in params:
                    param.grad = torch.randn(64, 64, generator=generator).t()
            ours.step()
            peer.step()
    ours.close()
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_what_is_wrong_with_one_group_changes_none() -> None:
    """Also state that torch's own loading has rounded to the parameter's dtype: no kernel may read it."""
    params = [torch.nn.Parameter(torch.ones(4).bfloat16()) for _ in range(2)]
    optimizer = superoffload.CPUAdamW([{"params": [param]} for param in params], lr=0.1, threads=1)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    before, group, state = bits(list(params)), optimizer.param_groups[1], optimizer.state[params[1]]
    wrong: list[tuple[dict[str, Any], str, Any, str]] = [
        (group, "betas", (0.9, 1.5), r"betas\[1\]=1\.5"),
        (state, "exp_avg", torch.zeros(4).bfloat16(), "exp_avg is torch.*expected"),
        (state, "exp_avg_sq", torch.zeros(3), "exp_avg_sq is torch.*expected"),
        (state, "master", None, "master is (NoneType|missing)"),
    ]
    for place, name, value, words in wrong:
        kept, place[name] = place[name], value
        with pytest.raises(ArgumentError, match=words):
            optimizer.step()
        place[name] = kept
        assert bits(list(params)) == before and {float(one["step"]) for one in optimizer.state.values()} == {1.0}
    optimizer.close()


def test_a_worker_that_fails_says_so_once_every_group_is_stepped() -> None:
    params = [torch.nn.Parameter(torch.ones(70_000)) for _ in range(2)]
    optimizer = superoffload.CPUAdamW([{"params": [param]} for param in params], lr=0.1, threads=2)
    for param in params:
        param.grad = torch.ones(70_000)
    versions = [param._version for param in params]
    pool = optimizer._workers.pool
    assert pool is not None
    pool.inject_fault(0, "as told")
    with pytest.raises(WorkerError, match=r"as told.*the step was completed"):
        optimizer.step()
    assert all(param.lt(1.0).all() for param in params)
    assert all(param._version > version for param, version in zip(params, versions, strict=True))
    optimizer.close()


def test_bad_input_and_use_after_close() -> None:
    with pytest.raises(ArgumentError, match="lr=-1"):
        superoffload.CPUAdamW(parameters(), lr=-1)
    with pytest.raises(ArgumentError, match="l2='no': expected True"):
        superoffload.CPUAdamW(parameters(), l2="no")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"bias_correction=False.*always corrected"):
        superoffload.CPUAdamW([{"params": parameters(), "bias_correction": False}])
    optimizer = superoffload.CPUAdamW([{"params": parameters(), "bias_correction": True}])
    state = optimizer.state_dict()
    state["param_groups"][0]["params"] = []
    with pytest.raises(ArgumentError, match="parameters in group 0"):
        optimizer.load_state_dict(state)
    optimizer.close()
    with pytest.raises(StateError, match="closed"):
        optimizer.step()


def test_a_load_goes_into_the_state_there_is() -> None:
    """Not beside it; what the checkpoint has no state of has none afterwards, and a refused one changes nothing."""
    model, other = torch.nn.Linear(3, 2).bfloat16(), torch.nn.Linear(3, 2).bfloat16()
    ours, theirs = (superoffload.CPUAdamW(one.parameters(), threads=1) for one in (model, other))
    for one in (model, other):
        for param in one.parameters():
            param.grad = torch.ones_like(param)
    ours.step()
    other.bias.grad = None
    theirs.step()
    held = dict(ours.state[model.weight])
    given = theirs.state_dict()
    damaged = copy.deepcopy(given)
    damaged["state"][0]["exp_avg_sq"][1, 2] = -1.0
    before = copy.deepcopy(ours.state_dict())
    with pytest.raises(ArgumentError, match="exp_avg_sq has values below 0"):
        ours.load_state_dict(damaged)
    for name, value in before["state"][0].items():
        assert torch.equal(ours.state[model.weight][name], value)
    ours.load_state_dict(given)
    assert all(ours.state[model.weight][name] is value for name, value in held.items())
    assert model.bias not in ours.state
    for name in ("step", "exp_avg", "exp_avg_sq"):
        assert torch.equal(held[name], theirs.state[other.weight][name])
    ours.close()
    theirs.close()


def optimizer_of(numel: int, threads: int, seed: int = 0) -> superoffload.CPUAdamW:
    generator = torch.Generator().manual_seed(seed)
    param = torch.nn.Parameter(torch.randn(numel, generator=generator))
    param.grad = torch.randn(numel, generator=generator)
    return superoffload.CPUAdamW([param], threads=threads)


def test_fifty_have_the_threads_of_one() -> None:
    before = set(worker_threads())
    many = [optimizer_of(70_000, threads=3) for _ in range(50)]
    mine = worker_threads_when(len(before) + 2) - before
    for optimizer in many:
        optimizer.step()
    other = optimizer_of(100, threads=2)
    worker_threads_when(len(before) + 3)
    other.close()
    for optimizer in many[:-1]:
        optimizer.close()
    assert_worker_threads(before | mine)
    many[-1].step()  # one that was closed has not ended the others' threads
    many[-1].close()
    assert_worker_threads(before)


def _halved(values: dict[str, Any], name: str, *, in_place: bool = False) -> None:
    half = values[name].clone() * 0.5
    if in_place:
        values[name].data = half
    else:
        values[name] = half


def _turned(tensor: Tensor | None) -> Tensor:
    """Copies a matrix into memory that has its columns one after the other."""
    assert tensor is not None
    return tensor.t().contiguous().t()


Changes = Callable[[torch.nn.Parameter, dict[str, Any], dict[str, Any]], object]
CHANGES: dict[str, Changes] = {  # of the first parameter, its group and its state
    "values elsewhere": lambda param, group, state: setattr(param, "data", param.data.clone() * 0.5),
    "another order in memory": lambda param, group, state: setattr(param, "data", _turned(param.data)),
    "another moment": lambda param, group, state: _halved(state, "exp_avg"),
    "a moment elsewhere": lambda param, group, state: _halved(state, "exp_avg_sq", in_place=True),
    "no state": lambda param, group, state: state.clear(),
    "steps set back": lambda param, group, state: state["step"].fill_(1.0),
    "another step tensor": lambda param, group, state: state.update(step=torch.tensor(9.0)),
    "order of parameters": lambda param, group, state: group["params"].reverse(),
    "no gradient": lambda param, group, state: setattr(param, "grad", None),
    "gradient in another order": lambda param, group, state: setattr(param, "grad", _turned(param.grad)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_a_program_changes_between_steps_counts(change: Changes) -> None:
    results = []
    for kind in (torch.optim.AdamW, superoffload.CPUAdamW):
        params = parameters()
        optimizer = kind(params, lr=0.05)
        for step in range(5):
            set_gradients(params, step)
            if step == 2:
                change(params[0], optimizer.param_groups[0], optimizer.state[params[0]])
            optimizer.step()
        results.append(params)
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@needs_grad_dtype
def test_gradients_of_another_kind_count_or_are_refused() -> None:
    half = torch.nn.Parameter(torch.ones(4, 6, dtype=torch.bfloat16))
    signs = torch.nn.Parameter(torch.ones(6))
    optimizer = superoffload.CPUAdamW([half, signs], lr=0.1, betas=(0.0, 0.0), weight_decay=0.0)
    half.grad, signs.grad = torch.ones_like(half), torch.ones(6)
    optimizer.step()
    half.grad_dtype = None
    half.grad, signs.grad = -torch.ones(4, 6), torch._neg_view(torch.ones(6))
    assert signs.grad.is_neg(), "its memory has the opposite signs"
    optimizer.step()
    assert torch.equal(half, torch.ones_like(half)) and torch.allclose(signs, torch.ones(6))
    wrong = torch.zeros(4, 6)
    for grad, message in ((wrong.to_sparse(), "layout"), (wrong, r"gradient of .*\(2, 6\)")):
        half.grad = grad
        if not grad.is_sparse:
            grad.data = grad.data[:2]
        with pytest.raises(ArgumentError, match=message):
            optimizer.step()


def test_steps_that_parameters_share_are_counted_once_each() -> None:
    params = parameters()
    optimizer = superoffload.CPUAdamW(params)
    shared = torch.tensor(3.0)
    for step in range(3):
        set_gradients(params, step)
        version = params[0]._version
        optimizer.step()
        assert params[0]._version > version, "autograd sees the write"
        if step == 0:
            for param in params:
                optimizer.state[param]["step"] = shared
    assert {float(optimizer.state[param]["step"]) for param in params} == {5.0}


def test_only_plain_tensors_in_host_memory_are_taken(tmp_path: Path) -> None:
    class OnGpu(Tensor):
        device = property(lambda _: torch.device("cuda:0"))

    expected = "expected a plain tensor on the CPU; superoffload.AdamW"
    with pytest.raises(ArgumentError, match=f"w: on cuda:0, {expected}"):
        superoffload.CPUAdamW([("w", torch.nn.Parameter(torch.ones(3).as_subclass(OnGpu)))])
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        sharded = torch.nn.Parameter(distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)]))
        with pytest.raises(ArgumentError, match=f"parameter 0: a DTensor, {expected}"):
            superoffload.CPUAdamW([sharded])
    finally:
        dist.destroy_process_group()


def test_what_a_program_takes_out_is_freed_and_nothing_grows() -> None:
    optimizer = superoffload.CPUAdamW([torch.nn.Parameter(torch.ones(3))])
    group = optimizer.param_groups[0]
    for _ in range(20):
        (param,) = group["params"]
        param.grad = torch.ones(3)
        optimizer.step()
        left = [weakref.ref(tensor) for tensor in (param, optimizer.state[param]["exp_avg"])]
        optimizer.state.clear()
        group["params"] = [torch.nn.Parameter(torch.ones(3))]
        del param
        assert [ref() for ref in left] == [None, None]
    assert len(optimizer._ready) <= 3


def test_steps_are_counted_in_fp32_whatever_the_default_dtype_is() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = superoffload.CPUAdamW([param])
    torch.set_default_dtype(torch.bfloat16)  # it has no 257
    try:
        for _ in range(260):
            param.grad = torch.ones(3, dtype=torch.float32)
            optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert float(optimizer.state[param]["step"]) == 260


def test_threads_of_python_may_step_one_optimizer() -> None:
    params = [torch.nn.Parameter(torch.ones(20)) for _ in range(50)]
    optimizer = superoffload.CPUAdamW(params, threads=1)
    for param in params:
        param.grad = torch.ones(20)
    threads = [threading.Thread(target=lambda: [optimizer.step() for _ in range(25)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {float(optimizer.state[param]["step"]) for param in params} == {100.0}
