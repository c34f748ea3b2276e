"""Checkpoints of several ranks: ours, torch.distributed.checkpoint's, and its optimizer state_dict functions."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from superoffload import AdamW, checkpoints
from superoffload.checkpoints import saving
from tests.support.over_stand_in import only_over_stand_in
from tests.support.rank_processes import (
    Net,
    error_of,
    layouts,
    net,
    on_ranks,
    on_stages,
    optimizer_of,
    tokens_of,
    whole,
)
from tests.support.saved_ranks import build, step

State = dict[str, Any]


def everything(model: Net, optimizer: AdamW) -> State:
    """All state, gathered, by name and kind."""
    states = optimizer.state_dict()["state"]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    names = {id(p): name for name, p in model.named_parameters()}
    found: State = {name: whole(value) for name, value in model.state_dict().items()}
    for i, param in enumerate(params):
        for key in ("master", "exp_avg", "exp_avg_sq", "step"):
            found[f"{key} {names[id(param)]}"] = whole(states[i][key])
    return found


def same(a: State, b: State) -> bool:
    return set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)


def save(folder: str, way: str, background: bool) -> State:
    model, options = build(way)
    with optimizer_of(model, **options) as optimizer:
        for seed in range(3):
            step(model, optimizer, seed)
        found = everything(model, optimizer)
        if way in ("fsdp2", "split masters", "8-bit moments"):
            model.loss(tokens_of(9, 0)).backward()  # in the middle of a window
        if background:
            saving = checkpoints.save_in_background(folder, model, optimizer, extra={"step": 3}, memory=0)
            step(model, optimizer, 3)
            saving.wait(60)
        else:
            checkpoints.save(folder, model, optimizer, extra={"step": 3})
        return found


def load(folder: str, way: str) -> State:
    model, options = build(way, seed=7)
    with optimizer_of(model, **options) as optimizer:
        step(model, optimizer, 20)
        extra = checkpoints.load(folder, model, optimizer)
        assert extra == {"step": 3}
        found = everything(model, optimizer)
        step(model, optimizer, 3)  # the first one is checked in full, on all ranks
        return found


@pytest.mark.over_stand_in
@only_over_stand_in(first="fsdp2")
@pytest.mark.parametrize(
    ("first", "background"),
    [("fsdp2", True), ("replicas", False), ("shard", True), ("replicate", False), ("8-bit moments", False)],
)
def test_any_number_of_ranks_loads_what_any_saved(first: str, background: bool, tmp_path: Path) -> None:
    folder = str(tmp_path / "step-3")
    count = 4 if first == "replicas" else 2
    saved, *others = on_ranks(count, save, folder, first, background)
    assert all(same(saved, other) for other in others)
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]
    then = {"fsdp2": "split masters", "replicas": "shard"}.get(first, "fsdp2")
    for found in on_ranks(4 if count == 2 else 2, load, folder, then):
        assert same(found, saved)
    model = net(torch.bfloat16, seed=9, tied=True)
    with optimizer_of(model) as optimizer:  # one process
        checkpoints.load(folder, model, optimizer)
        assert same(everything(model, optimizer), saved)
        step(model, optimizer, 3)


def one_cannot(folder: str) -> list[str]:
    """A folder that exists; a value that only one rank cannot save; another save that takes the name: no rank saves."""
    root, write = Path(folder), saving.Job.write_part
    model, options = build("fsdp2")

    def taken(*arguments: Any) -> Any:
        if dist.get_rank() == 0:
            shutil.copytree(root / "b", root / "c")
        return write(*arguments)

    with optimizer_of(model, **options) as optimizer:
        errors = [error_of(lambda: checkpoints.save(root, model, optimizer))]
        extra = {"x": open} if dist.get_rank() == 1 else {}
        errors.append(error_of(lambda: checkpoints.save(root / "a", model, optimizer, extra=extra)))
        checkpoints.save(root / "b", model, optimizer)
        with mock.patch("superoffload.checkpoints.saving.Job.write_part", taken):
            errors.append(error_of(lambda: checkpoints.save(root / "c", model, optimizer)))
        dist.barrier()
        checkpoints.load(root / "c", model, optimizer)
        if dist.get_rank() == 0:
            path = root / "b" / "rank-00001.safetensors"
            os.truncate(path, path.stat().st_size - 1)
        dist.barrier()
        before = optimizer.state_digests()
        errors.append(error_of(lambda: checkpoints.load(root / "b", model, optimizer)))
        assert optimizer.state_digests() == before
        step(model, optimizer, 0)
        return errors


@layouts("mesh", "stages")
def test_what_one_rank_cannot_do_no_rank_does(ranks: Any, tmp_path: Path) -> None:
    for rank, (exists, extra, taken, damaged) in enumerate(ranks(2, one_cannot, str(tmp_path))):
        assert "exists already" in exists and "extra" in extra
        assert ("another save has taken this name" if rank else "exists already") in taken
        assert "rank-00001.safetensors" in damaged and "damaged" in damaged
    assert sorted(os.listdir(tmp_path)) == ["b", "c"]


# ---- torch.distributed.checkpoint -------------------------------------------------------------------------------


class Loop:
    """Trains with the same global batch on any number of ranks."""

    def __init__(self, seed: int = 0, way: str = "fsdp2") -> None:
        self.model, options = build(way, seed, torch.float32 if way == "fsdp2" else torch.bfloat16)
        params = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = AdamW(params, lr=3e-3, max_grad_norm=1.0, threads=1, model=self.model, **options)

    def steps(self, seeds: range) -> State:
        """All state afterwards."""
        for seed in seeds:
            step(self.model, self.optimizer, seed)
        return everything(self.model, self.optimizer)


def dcp(folder: str, way: str, saves: bool, flat: bool = False) -> list[State]:
    """All state when it was saved or loaded, and two steps later."""
    loop = Loop(0 if saves else 4, way)
    at_save = loop.steps(range(3) if saves else range(20, 21))
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = get_state_dict(loop.model, loop.optimizer, options=options)
    values: dict[str, Any] = {"model": model, "optimizer": optimizer}
    if saves:
        state_dict_saver.save(values, checkpoint_id=folder)
    else:
        state_dict_loader.load(values, checkpoint_id=folder)
        given: dict[str, Any] = {"model_state_dict": model, "optim_state_dict": values["optimizer"]}
        set_state_dict(loop.model, loop.optimizer, **given, options=options)
    with loop.optimizer:
        return [at_save if saves else loop.steps(range(0)), loop.steps(range(3, 5))]


@pytest.mark.parametrize(("way", "count"), [("fsdp2", 2), ("8-bit moments", 4)])
def test_torch_distributed_checkpoint(way: str, count: int, tmp_path: Path) -> None:
    (at_save, at_end), *_ = on_ranks(2, dcp, str(tmp_path), way, True)
    for now, then in on_ranks(count, dcp, str(tmp_path), way, False):
        assert same(now, at_save) and (count != 2 or same(then, at_end))


def test_torch_distributed_checkpoint_of_stages(tmp_path: Path) -> None:
    results = on_stages(2, dcp, str(tmp_path), "fsdp2", True, True)
    loaded = on_stages(2, dcp, str(tmp_path), "fsdp2", False, True)
    for (now, then), (at_save, at_end) in zip(loaded, results, strict=True):
        assert same(now, at_save) and same(then, at_end)
    parts = nn.ModuleDict({f"stage{rank}": net(torch.float32, seed=9, tied=True) for rank in range(2)})
    values: dict[str, Any] = {"model": parts.state_dict()}
    state_dict_loader.load(values, checkpoint_id=tmp_path, no_dist=True)
    for at_save, _ in results:
        assert all(torch.equal(values["model"][name], at_save[name]) for name in at_save if name.startswith("stage"))


KINDS = (
    StateDictOptions(full_state_dict=True),
    StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=True),
    StateDictOptions(),
)


def full_state(way: str) -> list[bool]:
    """get_ and set_optimizer_state_dict: full tensors on the CPU, broadcast from the first rank, and sharded."""
    results = []
    for options in KINDS:
        loop, other = Loop(way=way), Loop(3, way)
        expected = loop.steps(range(2))
        read = StateDictOptions(full_state_dict=options.full_state_dict, cpu_offload=options.cpu_offload)
        state = get_optimizer_state_dict(loop.model, loop.optimizer, options=read)
        other.steps(range(9, 10))
        other.model.load_state_dict(loop.model.state_dict())
        given: Any = state if not options.broadcast_from_rank0 or dist.get_rank() == 0 else {}
        set_optimizer_state_dict(other.model, other.optimizer, given, options=options)
        results.append(same(other.steps(range(0)), expected))
        loop.optimizer.close()
        other.optimizer.close()
    return results


@pytest.mark.parametrize("way", ["fsdp2", "8-bit moments"])
def test_optimizer_state_dict_functions(way: str) -> None:
    assert on_ranks(2, full_state, way) == [[True, True, True]] * 2
