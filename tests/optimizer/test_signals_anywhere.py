"""Ctrl-C at every line that superoffload runs, once and again a little later: the last finished step stays savable.

What runs is counted line by line with sys.settrace, and a real signal comes at the n-th of them. A test takes some of
its lines, evenly; SIGNAL_POINTS=100000 takes all. docs/reliability.md has the figures.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import superoffload
from superoffload import AdamW, CPUAdamW, checkpoints
from tests.support.adamw_training import batch, check_counters, model_of, train

# Python itself loses what is raised in a __del__, and accumulate() cannot know why its context was never entered.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:superoffload. accumulate:RuntimeWarning"),
]

PACKAGE = str(Path(superoffload.__file__).parent)
POINTS = int(os.environ.get("SIGNAL_POINTS", "50"))  # per test
AGAIN = (0, 1, 3, 20)  # lines later; 0: once


class Lines:
    """Counts the lines of superoffload that the main thread runs, and sends SIGINT at some of them."""

    def __init__(self, at: frozenset[int] = frozenset()) -> None:
        self.count = 0
        self._at = at

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            self.count += 1
            if self.count in self._at:
                signal.raise_signal(signal.SIGINT)
        return self._line

    @contextmanager
    def running(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)


def interrupted(work: Callable[[], object], at: int, again: int) -> bool:
    """Whether Ctrl-C came out of ``work``."""
    try:
        with Lines(frozenset({at, at + again})).running():
            work()
    except KeyboardInterrupt:
        return True
    return False


def points(work: Callable[[], object], seed: int) -> Iterator[tuple[int, int]]:
    """Lines of ``work`` and how many lines later the second signal comes; about POINTS of them."""
    lines = Lines()
    with lines.running():
        work()
    rng = random.Random(seed)
    stride = max(1.0, lines.count / POINTS)
    found = [int(rng.random() * stride + i * stride) + 1 for i in range(int(lines.count / stride))]
    assert found, "it ran none of our lines"
    for at in found:
        yield at, rng.choice(AGAIN)
    print(f"{len(found)} of {lines.count} lines", end=" ")


def check_handlers() -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class Training:
    """A model that is interrupted, and one that takes the same steps undisturbed, without speculation."""

    def __init__(self, **options: Any) -> None:
        self.model, self.twin = model_of(), model_of()
        options = {"bucket_numel": 512, "threads": 1, "max_grad_norm": 1.0, **options}
        on_demand: dict[str, Any] = {"module": self.model} if options.get("delivery") == "on_demand" else {}
        self.optimizer = AdamW(self.model.parameters(), speculation="always", **options, **on_demand)
        options.pop("delivery", None)
        self.plain = AdamW(self.twin.parameters(), speculation="never", **options)
        self.steps = 0
        self.before = self.after = self.plain.state_digests()
        self.ahead()

    def ahead(self) -> None:
        """The undisturbed one takes a step."""
        self.before = self.after
        self.once(self.twin, self.plain)
        self.after = self.plain.state_digests()

    def once(self, model: nn.Module, optimizer: AdamW) -> None:
        optimizer.zero_grad()
        with optimizer.accumulate():
            batch(model, 2 * self.steps, scale=0.1).backward()
        batch(model, 2 * self.steps + 1, scale=0.1 if self.steps % 3 else 10.0).backward()  # clipped, now and then
        optimizer.step()

    def disturbed(self) -> None:
        self.once(self.model, self.optimizer)

    def settle(self) -> None:
        """It is where it was, or one step further; then the twin goes there, too."""
        found = self.optimizer.state_digests()
        assert found in (self.before, self.after), self.steps
        if found == self.after:
            self.steps += 1
            self.ahead()

    def close(self) -> None:
        self.optimizer.close()
        self.plain.close()
        check_counters(self.optimizer)


@pytest.fixture
def trainings() -> Iterator[Callable[..., Training]]:
    made: list[Training] = []

    def make(**options: Any) -> Training:
        made.append(Training(**options))
        return made[-1]

    yield make
    for training in made:
        training.close()
    check_handlers()


@pytest.mark.parametrize("delivery", ["eager", "on_demand"])
def test_in_backward_and_step(trainings: Callable[..., Training], delivery: str) -> None:
    training = trainings(delivery=delivery)
    for _ in range(3):  # until nothing happens for the first time any more
        training.disturbed()
        training.settle()
    came_out = 0
    for at, again in points(training.disturbed, seed=len(delivery)):
        training.settle()
        came_out += interrupted(training.disturbed, at, again)
        check_handlers()
    training.settle()
    assert came_out > POINTS / 5 and training.steps > POINTS / 5


@pytest.mark.parametrize("background", [False, True])
def test_in_a_save(trainings: Callable[..., Training], background: bool, tmp_path: Path) -> None:
    training = trainings()
    for _ in range(3):
        training.disturbed()
        training.settle()
    names = iter(range(10_000))

    def save() -> None:
        folder = tmp_path / str(next(names))
        if background:
            checkpoints.save_in_background(folder, training.model, training.optimizer).wait()
        else:
            checkpoints.save(folder, training.model, training.optimizer)

    for at, again in points(save, seed=int(background)):
        interrupted(save, at, again)
        check_handlers()
        assert training.optimizer.state_digests() == training.before
        if at % 10 == 0:  # it goes on, and waits for nothing that was cut off
            training.disturbed()
            training.settle()
    last = checkpoints.save(tmp_path / "last", training.model, training.optimizer)
    for folder in [*tmp_path.glob("[0-9]*"), last]:  # those that have their name are whole
        checkpoints.load(folder, model_of())
    with AdamW(model_of().parameters(), threads=1) as other:
        checkpoints.load(last, training.twin, training.plain)
        other.load_state_dict(training.optimizer.state_dict())
    assert training.plain.state_digests() == training.optimizer.state_digests()


def test_in_a_load(trainings: Callable[..., Training], tmp_path: Path) -> None:
    """All of the checkpoint, or nothing."""
    training = trainings()
    checkpoints.save(tmp_path / "first", training.model, training.optimizer)
    begun = training.optimizer.state_digests()
    training.disturbed()
    training.settle()
    checkpoints.save(tmp_path / "second", training.model, training.optimizer)
    ended = training.optimizer.state_digests()
    loads = 0

    def load() -> None:
        checkpoints.load(tmp_path / ("first" if loads % 2 else "second"), training.model, training.optimizer)

    for at, again in points(load, seed=3):
        loads += 1
        interrupted(load, at, again)
        check_handlers()
        assert training.optimizer.state_digests() in (begun, ended)
        load()
    load()


def test_while_it_is_closed() -> None:
    for at, again in points(Training().optimizer.close, seed=5):
        training = Training()
        training.disturbed()
        training.settle()
        batch(training.model, 0).backward()
        interrupted(training.optimizer.close, at, again)
        check_handlers()
        assert training.optimizer.state_digests() == training.before
        assert training.optimizer.state_dict()["state"]
        training.close()


def test_in_a_step_of_the_kernel_alone() -> None:
    """Before it, or after it; also the first, in which state is made."""

    def trained(steps: int, ends: bool = True) -> tuple[nn.Module, CPUAdamW]:
        model: Any = model_of(torch.bfloat16)
        optimizer: Any = CPUAdamW(model.parameters(), threads=1)
        train(model, optimizer, range(steps))
        if not ends:
            batch(model, steps).backward()
        return model, optimizer

    def bits(model: nn.Module, optimizer: CPUAdamW) -> list[list[float]]:
        state = optimizer.state_dict()["state"]
        tensors = [*model.parameters(), *(value for values in state.values() for value in values.values())]
        return [tensor.detach().reshape(-1).tolist() for tensor in tensors]

    expected = [bits(*trained(steps)) for steps in range(3)]
    for at, again in points(trained(0, ends=False)[1].step, seed=6):
        model, optimizer = trained(0, ends=False)
        interrupted(optimizer.step, at, again)
        check_handlers()
        assert bits(model, optimizer) in expected[:2]
        if bits(model, optimizer) == expected[0]:
            optimizer.step()
        optimizer.zero_grad()
        batch(model, 1).backward()
        optimizer.step()
        assert bits(model, optimizer) == expected[2]
        optimizer.close()
