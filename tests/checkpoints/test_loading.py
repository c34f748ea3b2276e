"""Loading: compared in full before anything changes, without memory beside the state, never half."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from superoffload import AdamW, checkpoints
from superoffload.checkpoints import loading
from superoffload.errors import ArgumentError, HostMemoryError, StateError
from superoffload.optimizer.state import State
from tests.support.rank_processes import error_of, on_ranks, optimizer_of
from tests.support.saved_ranks import build, step
from tests.support.saved_runs import Run, assert_same, save_two_steps

MEMORY = """
import gc, sys, threading
import torch
from torch import nn
from superoffload import AdamW, CPUAdamW, checkpoints

torch.set_num_threads(1)

def anonymous():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

def measure(name, work):
    gc.collect()
    steady, peak, ended = anonymous(), [0], threading.Event()
    def watch():  # the pages of a mapped file are no memory that is taken
        while not ended.wait(0.002):
            peak[0] = max(peak[0], anonymous())
    watching = threading.Thread(target=watch)
    watching.start()
    work()
    ended.set()
    watching.join()
    print(name, steady, peak[0])

def measure_all(folder, width):
    split = lambda params, threads: AdamW(params, threads=threads, master_dtype="split")
    for kind in (AdamW, split, CPUAdamW):
        model = nn.Sequential(nn.Embedding(4 * width, width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width))
        optimizer = kind(model.bfloat16().parameters(), threads=1)
        model(torch.arange(4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        name = "split" if kind is split else kind.__name__
        if kind is not CPUAdamW:
            measure("save_" + name, lambda: checkpoints.save(folder + name, model, optimizer))
            measure("load_" + name, lambda: checkpoints.load(folder + name, model, optimizer))
        given = optimizer.state_dict()
        measure(name, lambda: optimizer.load_state_dict(given))
        optimizer.close()
        del model, optimizer, given

measure_all(sys.argv[1] + "/small", 8)  # what is imported and allocated once is no part of the state
measure_all(sys.argv[1] + "/large", 896)
"""


@pytest.mark.skipif(
    not os.path.exists("/proc/self/status"), reason="needs Linux with /proc, which tells the memory that is taken"
)
def test_saving_and_loading_need_no_memory_beside_the_state(tmp_path: Path) -> None:
    """10 M parameters in three tensors: a second copy of any part of the state would be more than these 3 %."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True, timeout=300, check=True
    )
    rows = [line.split() for line in done.stdout.splitlines()][7:]
    found = {name: (int(peak) - int(steady)) / int(steady) for name, steady, peak in rows}
    assert len(found) == 7 and all(more <= 0.03 for more in found.values()), found


# ---- all comparisons come first ---------------------------------------------------------------------------------


class Keeping(nn.Module):
    """Extra state that is a tensor, as quantizing layers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = torch.zeros(3)

    def get_extra_state(self) -> Any:
        return copy.deepcopy(self.kept)

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


class OneWay(nn.Module):
    """Gives extra state that is no tensor, and takes none."""

    def get_extra_state(self) -> Any:
        return 1


def model_with(last: nn.Module) -> nn.Sequential:
    torch.manual_seed(len(list(last.modules())))
    return nn.Sequential(nn.Linear(3, 2), last)


def test_extra_state_is_compared_before_anything_changes(tmp_path: Path) -> None:
    """And goes back to its module, also where it is a tensor."""
    lacks = "lacks the extra state 1._extra_state"
    for number, (saved, ours, words) in enumerate((
        (OneWay(), nn.Identity(), f"the model {lacks}"),
        (Keeping(), nn.Identity(), f"the model {lacks}"),
        (nn.Identity(), Keeping(), f"the checkpoint {lacks}"),
        (OneWay(), OneWay(), "1._extra_state: the module has get_extra_state and no set_extra_state"),
    )):  # fmt: skip
        first, second = model_with(saved), model_with(ours)
        folder = tmp_path / str(number)
        with AdamW(first.parameters(), threads=1) as one, AdamW(second.parameters(), threads=1) as other:
            checkpoints.save(folder, first, one)
            with torch.no_grad():
                next(second.parameters()).add_(1.0)
            for optimizer in (other, None):
                before = [param.clone() for param in second.parameters()], other.state_dict()["param_groups"]
                with pytest.raises(ArgumentError) as caught:
                    checkpoints.load(folder, second, optimizer)
                assert words in str(caught.value)
                assert all(map(torch.equal, before[0], second.parameters()))
                assert other.state_dict()["param_groups"] == before[1]
    keeping, took = Keeping(), Keeping()
    keeping.kept, wrapped = torch.tensor([1.0, 2.0, 3.0]), nn.Module()
    model, wrapped.module = model_with(keeping), model_with(took)  # as DistributedDataParallel names what it wraps
    with AdamW(model.parameters(), threads=1) as optimizer:
        checkpoints.save(tmp_path / "a", model, optimizer)
    checkpoints.load(tmp_path / "a", wrapped)
    assert torch.equal(took.kept, keeping.kept)


class Two(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.randn(3))
        self.other = self.one if tied else nn.Parameter(torch.randn(3))


def test_tied_in_the_model_and_two_in_the_checkpoint(tmp_path: Path) -> None:
    model, tied = Two(False), Two(True)
    with AdamW(model.parameters(), threads=1) as optimizer:
        checkpoints.save(tmp_path / "a", model, optimizer)
        before = tied.one.clone()
        with pytest.raises(ArgumentError, match="other differs from one, and is tied to it"):
            checkpoints.load(tmp_path / "a", tied)
        assert torch.equal(tied.one, before)
        with torch.no_grad():
            model.other.copy_(model.one)
        checkpoints.save(tmp_path / "b", model, optimizer)
    checkpoints.load(tmp_path / "b", tied)
    assert torch.equal(tied.one, model.one)


# ---- what fails once values change ------------------------------------------------------------------------------


def fail_while_it_loads(patch: pytest.MonkeyPatch, error: type[BaseException]) -> None:
    patch.setattr(loading, "_load_model", mock.Mock(side_effect=error("as a module's set_extra_state may")))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_loaded_in_part(error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = save_two_steps(tmp_path / "good")
    run, straight = Run(3, torch.bfloat16), Run(4, torch.bfloat16)
    with monkeypatch.context() as patch:
        fail_while_it_loads(patch, error)
        with pytest.raises(StateError if error is RuntimeError else error):
            checkpoints.load(saved, run.model, run.optimizer)
    run.backward(1)
    for use in (
        run.optimizer.step,
        run.optimizer.state_dict,
        run.optimizer.state_digests,
        lambda: checkpoints.save(tmp_path / "new", run.model, run.optimizer),
    ):
        with pytest.raises(StateError, match="state was loaded in part"):
            use()
    for one in (run, straight):
        one.resume(saved)
        one.steps(range(2, 4))
    assert_same(run.everything(), straight.everything())
    for one in (run, straight):
        one.optimizer.close()
    with pytest.raises(StateError, match="is closed"):
        checkpoints.load(saved, run.model, run.optimizer)


def changes_on_one(folder: str) -> list[str]:
    model, options = build("fsdp2")
    errors = []
    with optimizer_of(model, **options) as optimizer:
        step(model, optimizer, 0)
        for name in ("a", "b"):
            checkpoints.save(f"{folder}/{name}", model, optimizer)
        step(model, optimizer, 1)
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:
                fail_while_it_loads(patch, RuntimeError)
            errors.append(error_of(lambda: checkpoints.load(f"{folder}/a", model, optimizer)))
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:  # for state of parameters that had none, before anything is read
                refuse = mock.Mock(side_effect=HostMemoryError("1 GB more were refused"))
                patch.setattr(State, "adopt_loaded", refuse)
            errors.append(error_of(lambda: checkpoints.load(f"{folder}/b", model, optimizer)))
        errors.append(error_of(lambda: optimizer.step()))
        checkpoints.load(f"{folder}/b", model, optimizer)
        step(model, optimizer, 1)
    return errors


def test_where_one_rank_fails_half_way_none_goes_on(tmp_path: Path) -> None:
    first, second = on_ranks(2, changes_on_one, str(tmp_path))
    assert "RankError: load(): rank 1 failed, so the state is loaded in part, everywhere" in first[0]
    assert "StateError" in second[0] and "as a module's set_extra_state may" in second[0]
    assert "RankError: load(): rank 1 failed, so the state is loaded in part" in first[1] and "refused" in second[1]
    assert all("StateError" in one[2] and "loaded in part" in one[2] for one in (first, second))
