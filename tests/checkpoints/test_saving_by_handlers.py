"""Handlers of signals that save, or step, while a save is under way: what each of them writes is one moment's state."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from superoffload import AdamW, checkpoints
from superoffload.checkpoints import saving, tensor_files
from tests.support import saved_runs
from tests.support.adamw_training import model_of, train


@contextmanager
def handled_at(
    owner: Any, name: str, at: int, handle: Callable[[], object], first: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """A signal whose handler is ``handle`` comes at the ``at``-th call of ``owner.name``, after ``first``."""
    real, calls = getattr(owner, name), [0]

    def called(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            first()
            os.kill(os.getpid(), signal.SIGUSR1)
        return real(*arguments, **options)

    before = signal.signal(signal.SIGUSR1, lambda *_: handle())
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, called)
            yield
    finally:
        signal.signal(signal.SIGUSR1, before)


class Run:
    """A model without buffers, which a forward would write to while they are saved."""

    def __init__(self) -> None:
        self.model = model_of()
        self.optimizer = AdamW(self.model.parameters(), lr=1e-2, speculation="always", threads=1)

    def train(self) -> None:
        train(self.model, self.optimizer, range(2))


@pytest.fixture
def run() -> Iterator[Run]:
    made = Run()
    made.train()
    yield made
    made.optimizer.close()


def assert_loads(folder: Path, digests: dict[str, str]) -> None:
    other = Run()
    checkpoints.load(folder, other.model, other.optimizer)
    assert other.optimizer.state_digests() == digests
    other.optimizer.close()


def test_a_handler_saves_and_trains_in_the_middle_of_a_save(run: Run, tmp_path: Path) -> None:
    digests = run.optimizer.state_digests()

    def handle() -> None:
        checkpoints.save(tmp_path / "told", run.model, run.optimizer)
        run.train()

    with handled_at(tensor_files.TensorFile, "write", 3, handle):
        checkpoints.save(tmp_path / "step-2", run.model, run.optimizer)
    assert run.optimizer.state_digests() != digests
    for name in ("told", "step-2"):
        assert_loads(tmp_path / name, digests)


def test_saves_that_begin_within_each_other_are_both_protected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one begins when the first has made its folder, and is written after two more steps."""
    run, go, write = saved_runs.Run(0, torch.float32), threading.Event(), tensor_files.TensorFile.write
    run.steps(range(2))
    wanted, extra, savings = run.everything(), run.extra(), list[checkpoints.Saving]()

    def later(*arguments: Any) -> None:
        go.wait(60)
        write(*arguments)

    def save(name: str) -> None:
        folder = tmp_path / name
        savings.append(checkpoints.save_in_background(folder, run.model, run.optimizer, extra=extra, memory=1 << 30))

    monkeypatch.setattr(tensor_files.TensorFile, "write", later)
    with handled_at(saving, "_agree_on_folder", 1, lambda: save("told")):
        save("step-2")
    run.steps(range(2, 4))
    go.set()
    for one in savings:
        one.wait(60)
    run.optimizer.close()
    for name in ("told", "step-2"):
        other = saved_runs.Run(3, torch.float32)
        other.resume(tmp_path / name)
        saved_runs.assert_same(other.everything(), wanted)
        other.optimizer.close()


def test_a_handler_that_needs_the_optimizer_does_not_wait_for_a_thread_that_waits_for_the_save(
    run: Run, tmp_path: Path
) -> None:
    """The other thread trains, and needs to change what the interrupted save still has to read."""
    digests = run.optimizer.state_digests()
    training = threading.Thread(target=run.train, daemon=True)

    def train_beside() -> None:
        training.start()
        training.join(0.5)  # it is done, or waits for what is being read

    with handled_at(tensor_files.TensorFile, "write", 2, run.optimizer.synchronize, first=train_beside):
        checkpoints.save(tmp_path / "step-2", run.model, run.optimizer)
    training.join(60)
    assert not training.is_alive()
    assert_loads(tmp_path / "step-2", digests)
