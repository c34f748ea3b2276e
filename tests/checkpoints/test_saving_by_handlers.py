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
from tests.support.adamw_training import model_of, train
from tests.support.saved_runs import Run, assert_same


@contextmanager
def handling(work: Callable[[], object]) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, lambda *_: work())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def raise_at(
    patch: pytest.MonkeyPatch, owner: Any, name: str, at: int, first: Callable[[], None] = lambda: None
) -> None:
    """The signal comes when ``owner.name`` is called for the ``at``-th time, after ``first``."""
    real, calls = getattr(owner, name), [0]

    def called(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            first()
            os.kill(os.getpid(), signal.SIGUSR1)
        return real(*arguments, **options)

    patch.setattr(owner, name, called)


def assert_saved(folder: Path, wanted: tuple[Any, ...]) -> None:
    other = Run(3, torch.float32)
    other.resume(folder)
    assert_same(other.everything(), wanted)
    other.optimizer.close()


@pytest.fixture
def run() -> Iterator[Run]:
    made = Run(0, torch.float32)
    made.steps(range(2))
    yield made
    made.optimizer.close()


def test_a_handler_saves_in_the_middle_of_a_save(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, extra = run.everything(), run.extra()
    raise_at(monkeypatch, tensor_files.TensorFile, "write", 3)
    with handling(lambda: checkpoints.save(tmp_path / "told", run.model, run.optimizer, extra=extra)):
        checkpoints.save(tmp_path / "step-2", run.model, run.optimizer, extra=extra)
    for name in ("told", "step-2"):
        assert_saved(tmp_path / name, wanted)


def test_saves_that_begin_within_each_other_are_both_protected(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one begins when the first has made its folder, and is written after two more steps."""
    wanted, extra, second = run.everything(), run.extra(), list[checkpoints.Saving]()
    go = threading.Event()
    write = tensor_files.TensorFile.write

    def later(*arguments: Any) -> None:
        go.wait(60)
        write(*arguments)

    def save() -> None:
        second.append(
            checkpoints.save_in_background(tmp_path / "told", run.model, run.optimizer, extra=extra, memory=1 << 30)
        )

    with monkeypatch.context() as patch, handling(save):
        patch.setattr(tensor_files.TensorFile, "write", later)
        raise_at(patch, saving, "_agree_on_folder", 1)
        first = checkpoints.save_in_background(
            tmp_path / "step-2", run.model, run.optimizer, extra=extra, memory=1 << 30
        )
        run.steps(range(2, 4))
        go.set()
        for one in (first, *second):
            one.wait(60)
    for name in ("told", "step-2"):
        assert_saved(tmp_path / name, wanted)


class Plain:
    """A model without buffers, which a forward would write to while they are saved."""

    def __init__(self) -> None:
        self.model = model_of()
        self.optimizer = AdamW(self.model.parameters(), lr=1e-2, speculation="always", threads=1)

    def train(self) -> None:
        train(self.model, self.optimizer, range(2))


@pytest.fixture
def plain() -> Iterator[Plain]:
    made = Plain()
    made.train()
    yield made
    made.optimizer.close()


def assert_loads(folder: Path, digests: dict[str, str]) -> None:
    other = Plain()
    checkpoints.load(folder, other.model, other.optimizer)
    assert other.optimizer.state_digests() == digests
    other.optimizer.close()


def test_a_handler_trains_in_the_middle_of_a_save(
    plain: Plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = plain.optimizer.state_digests()
    raise_at(monkeypatch, tensor_files.TensorFile, "write", 3)
    with handling(plain.train):
        checkpoints.save(tmp_path / "step-2", plain.model, plain.optimizer)
    assert plain.optimizer.state_digests() != digests
    assert_loads(tmp_path / "step-2", digests)


def test_a_handler_that_needs_the_optimizer_does_not_wait_for_a_thread_that_waits_for_the_save(
    plain: Plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other thread trains, and needs to change what the interrupted save still has to read."""
    digests = plain.optimizer.state_digests()
    training = threading.Thread(target=plain.train, daemon=True)

    def train_beside() -> None:
        training.start()
        training.join(0.5)  # it is done, or waits for what is being read

    raise_at(monkeypatch, tensor_files.TensorFile, "write", 2, first=train_beside)
    with handling(plain.optimizer.synchronize):
        checkpoints.save(tmp_path / "step-2", plain.model, plain.optimizer)
    training.join(60)
    assert not training.is_alive()
    assert_loads(tmp_path / "step-2", digests)
