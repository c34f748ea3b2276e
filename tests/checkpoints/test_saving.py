"""superoffload.checkpoints in one process: resumed to the bit, in the background, whole or not at all."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from superoffload import AdamW, checkpoints
from superoffload.checkpoints.tensor_files import TensorFile
from superoffload.engine.snapshot import Snapshot
from superoffload.errors import StateError
from tests.support.adamw_training import model_of, train
from tests.support.over_stand_in import only_over_stand_in
from tests.support.saved_runs import Run, assert_same


@pytest.mark.over_stand_in
@only_over_stand_in(dtype=torch.bfloat16)
@pytest.mark.parametrize(
    ("dtype", "state", "master", "background"),
    [
        (torch.float32, "fp32", "fp32", True),
        (torch.float16, "fp32", "fp32", False),
        (torch.bfloat16, "bf16", "split", True),
    ],
)
def test_resume_is_bit_exact(dtype: torch.dtype, state: str, master: str, background: bool, tmp_path: Path) -> None:
    kinds = {"state_dtype": state, "master_dtype": master}
    straight = Run(0, dtype, **kinds)
    losses, at, savings = [], (0, 4), []
    for step in range(7):
        saved = tmp_path / f"step-{step}", straight.model, straight.optimizer
        if step in at and background:
            savings.append(checkpoints.save_in_background(*saved, extra=straight.extra()))
        elif step in at:
            checkpoints.save(*saved, extra=straight.extra())
        losses += straight.steps(range(step, step + 1))
    for saving in savings:
        saving.wait(60)
    for step in at:
        other = Run(5, dtype, "never", **kinds)
        other.steps(range(50, 53))
        other.resume(tmp_path / f"step-{step}")
        assert other.steps(range(step, 7)) == losses[step:]
        assert_same(other.everything(), straight.everything())
        other.optimizer.close()
    straight.optimizer.close()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The writing thread writes an entry only once it is set."""
    go, write = threading.Event(), TensorFile.write

    def held_up(file: TensorFile, name: str, runs: Any) -> None:
        assert go.wait(60)
        write(file, name, runs)

    monkeypatch.setattr(TensorFile, "write", held_up)
    return go


@pytest.mark.over_stand_in
@pytest.mark.parametrize(("mode", "master", "memory"), [("always", "split", 1 << 30), ("never", "fp32", 0)])
def test_training_goes_on_while_a_checkpoint_is_written(
    mode: str, master: str, memory: int, tmp_path: Path, held: threading.Event
) -> None:
    """Without memory for copies a step waits for its part."""
    run = Run(0, torch.bfloat16, mode, master_dtype=master)
    run.steps(range(2))
    at_save, extra = run.everything(), run.extra()
    saving = checkpoints.save_in_background(tmp_path / "a", run.model, run.optimizer, extra=extra, memory=memory)
    if memory == 0:
        threading.Timer(0.3, held.set).start()
    run.steps(range(2, 5))
    assert held.is_set() == (memory == 0), "the timer, and nothing else, has let the step go on"
    if memory:  # nothing was written yet
        assert not saving.done
        with pytest.raises(StateError, match="not written after"):
            saving.wait(0.01)
        held.set()
    assert saving.wait(60) == tmp_path / "a"
    state = sum(3 * 4 * p.numel() for p in run.model.parameters() if p.requires_grad)
    assert saving.largest_extra_bytes <= state and (saving.largest_extra_bytes > 0) == (memory > 0)
    other = Run(1, torch.bfloat16)
    other.resume(tmp_path / "a")
    assert_same(other.everything(), at_save)
    for one in (run, other):
        one.optimizer.close()


def test_a_frozen_parameter_written_meanwhile_is_an_error(tmp_path: Path, held: threading.Event) -> None:
    run = Run(0, torch.float32)
    saving = checkpoints.save_in_background(tmp_path / "a", run.model, run.optimizer)
    with torch.no_grad():
        run.model.frozen.weight.add_(1.0)
    held.set()
    with pytest.raises(StateError, match=r"frozen.weight: written to while it was saved"):
        saving.wait(60)
    assert list(tmp_path.iterdir()) == []
    run.optimizer.close()


def test_what_cannot_be_started_leaves_nothing_to_wait_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(0, torch.float32)
    run.steps(range(2))
    refused: list[tuple[type, str, Exception]] = [
        (threading.Thread, "start", RuntimeError("can't start new thread")),
        (Snapshot, "__init__", MemoryError("a copy of state on the accelerator")),
    ]
    for owner, name, error in refused:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, mock.Mock(side_effect=error))
            with pytest.raises(type(error), match=str(error)):
                checkpoints.save_in_background(tmp_path / "step-2", run.model, run.optimizer, memory=0)
        assert list(tmp_path.iterdir()) == []
    run.steps(range(2, 4))
    run.optimizer.close()


@pytest.mark.over_stand_in
@pytest.mark.parametrize("first", ["torch", "ours"])
def test_checkpoints_fit_torchs_own_adamw(first: str, tmp_path: Path) -> None:
    """Saved by one, gone on with by the other: as one of them alone."""
    model, other = model_of(), model_of(seed=9)
    saves, loads = (model, other) if first == "ours" else (other, model)
    theirs = torch.optim.AdamW(loads.parameters(), lr=1e-3)
    with AdamW(saves.parameters(), lr=1e-3, threads=1) as ours:
        optimizers: dict[nn.Module, Any] = {saves: ours, loads: theirs}
        train(model, optimizers[model], range(5))
        checkpoints.save(tmp_path / "a", model, optimizers[model])
        checkpoints.load(tmp_path / "a", other, optimizers[other])
        for one in (model, other):
            train(one, optimizers[one], range(5, 10))
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
