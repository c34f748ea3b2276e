"""Several threads of a program on one optimizer: backward beside backward, and beside everything else."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from superoffload import AdamW, checkpoints
from superoffload.engine.bucket import Bucket
from superoffload.engine.engine import Engine
from superoffload.errors import ArgumentError, StateError
from superoffload.links.cuda.link import CudaLink
from superoffload.optimizer import intake
from tests.support.adamw_training import batch, check_counters, model_of, run_python
from tests.support.fake_cuda import Fake, on_fake_device, on_host

THREADS = 4
STEPS = 4


@contextmanager
def switching(seed: int) -> Iterator[None]:
    """Threads take turns as often as Python can, and by chance wherever the engine's bookkeeping is half done."""
    rng = random.Random(seed)

    def given_up(owner: type, name: str) -> Any:
        original = getattr(owner, name)

        def method(*args: Any, **kwargs: Any) -> Any:
            if rng.random() < 0.3:
                time.sleep(1e-4)
            result = original(*args, **kwargs)
            if rng.random() < 0.3:
                time.sleep(1e-4)
            return result

        return mock.patch.object(owner, name, method)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with given_up(Bucket, "receive"), given_up(CudaLink, "received"), given_up(Bucket, "freeze"):
            yield
    finally:
        sys.setswitchinterval(interval)


def together(work: Callable[[int], object]) -> list[BaseException]:
    """Runs ``work(i)`` in as many threads at once; what they raise is lost, as it is in a plain thread."""
    barrier = threading.Barrier(THREADS)

    def run(i: int) -> BaseException | None:
        barrier.wait()
        try:
            work(i)
        except BaseException as error:
            return error
        return None

    with ThreadPoolExecutor(THREADS) as pool:
        return [error for error in pool.map(run, range(THREADS)) if error is not None]


def one_by_one(work: Callable[[int], object]) -> list[BaseException]:
    for i in range(THREADS):
        work(i)
    return []


def nets(dtype: torch.dtype = torch.float32) -> nn.ModuleList:
    """One for each thread; their parameters share buckets."""
    return nn.ModuleList(model_of(dtype, seed) for seed in range(THREADS))


def digests(mode: str, run: Callable[[Any], list[BaseException]], dtype: torch.dtype, fake: Fake) -> dict[str, str]:
    """After a few steps, clipped now and then, of which every backward is one ``run`` of several threads."""
    models = nets(dtype)
    with AdamW(models.parameters(), speculation=mode, bucket_numel=3000, threads=2, max_grad_norm=3.0) as optimizer:
        for step in range(STEPS):
            optimizer.zero_grad()
            fake.synchronize()  # parameters are read behind the stream that brings them
            losses = [batch(model, 10 * step + i) for i, model in enumerate(models)]
            assert run(lambda i, losses=losses: losses[i].backward()) == []
            optimizer.step()
        check_counters(optimizer)
        fake.synchronize()
        return optimizer.state_digests()


@pytest.mark.parametrize("link", ["host", "device"])
def test_backward_in_several_threads_gives_the_bits_of_one(fake: Fake, link: str) -> None:
    dtype = torch.bfloat16 if link == "device" else torch.float32
    with on_host():
        expected = digests("never", one_by_one, dtype, fake)
    for seed, mode in enumerate(("always", "always", "always", "adaptive")):
        with switching(seed), on_fake_device(fake) if link == "device" else nullcontext():
            assert digests(mode, together, dtype, fake) == expected, seed


def test_an_error_that_was_lost_with_its_thread_is_raised_by_step() -> None:
    models = nets()
    with AdamW(models.parameters(), speculation="always", bucket_numel=3000, threads=2) as optimizer:
        before = optimizer.state_digests()
        refused = optimizer.param_groups[0]["params"][10]
        original = Engine.arrive

        def arrive(engine: Engine, shard: Any, *args: Any, **kwargs: Any) -> None:
            if shard.target().data_ptr() == refused.data_ptr():
                raise ArgumentError("as told")
            original(engine, shard, *args, **kwargs)

        def backward(i: int) -> None:
            batch(models[i], i).backward()

        with mock.patch.object(Engine, "arrive", arrive):
            assert [str(error) for error in together(backward)] == ["as told"]
        for _ in range(2):  # as often as it is tried: gradients are missing
            with pytest.raises(StateError, match=r"ArgumentError: as told.*gradients are missing.*zero_grad") as caught:
                optimizer.step()
            assert isinstance(caught.value.__cause__, ArgumentError)
        assert optimizer.state_digests() == before
        optimizer.zero_grad()
        assert not together(backward)
        optimizer.step()
        assert optimizer.stats()["steps"] == 1


def test_a_gradient_that_another_thread_removes_meanwhile_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    removed = next(model.parameters())

    def zero_grad_beside(param: torch.Tensor) -> None:
        if param is removed:
            param.grad = None

    monkeypatch.setattr(intake, "await_gradient", zero_grad_beside)
    with AdamW(model.parameters(), speculation="always", threads=1) as optimizer:
        before = removed.detach().clone()
        batch(model, 0).backward()
        optimizer.step()
        assert optimizer.stats()["steps"] == 1 and torch.equal(removed, before)


@contextmanager
def backward_beside(model: nn.Module) -> Iterator[list[BaseException]]:
    """Another thread runs one backward after the other."""
    ended = threading.Event()
    lost: list[BaseException] = []

    def run() -> None:
        seed = 0
        try:
            while not ended.is_set():
                loss = batch(model, seed := seed + 1)
                try:
                    loss.backward()
                except RuntimeError as error:  # torch's own answer to a step between forward and backward
                    if "modified by an inplace operation" not in str(error):
                        raise
        except BaseException as error:
            lost.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield lost
    finally:
        ended.set()
        thread.join(60)
        assert not thread.is_alive(), "a deadlock"


def test_the_state_beside_a_backward_is_that_of_the_last_step(tmp_path: Path) -> None:
    model = model_of()
    with AdamW(model.parameters(), speculation="always", bucket_numel=512, threads=2) as optimizer:
        batch(model, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        digest, state = optimizer.state_digests(), optimizer.state_dict()["state"]
        with switching(0), backward_beside(model) as lost:
            for i in range(4):
                found = optimizer.state_dict()["state"]
                for position, values in state.items():
                    assert all(torch.equal(found[position][name], value) for name, value in values.items())
                checkpoints.save(tmp_path / str(i), model, optimizer)
        assert not lost
        assert optimizer.state_digests() == digest
        saved = [model_of(seed=5) for _ in range(4)]
        for i, other in enumerate(saved):
            with AdamW(other.parameters(), threads=1) as loaded:
                checkpoints.load(tmp_path / str(i), other, loaded)
                assert loaded.state_digests() == digest


def test_steps_and_the_end_beside_a_backward() -> None:
    """Which gradients a step finds is the program's affair; every step is whole, and backward goes on without us."""
    model = model_of()
    optimizer = AdamW(model.parameters(), speculation="always", bucket_numel=512, threads=2)
    with switching(1), backward_beside(model) as lost:
        for _ in range(5):
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        state = optimizer.state_digests()
        time.sleep(0.01)
    assert not lost
    assert optimizer.state_digests() == state
    check_counters(optimizer)


FORKED = """
import os, threading, time, torch
from superoffload import AdamW
from superoffload.engine.engine import Engine
param = torch.nn.Parameter(torch.ones(100))
optimizer = AdamW([param], speculation="always", threads=1)
inside, go_on, original = threading.Event(), threading.Event(), Engine.arrive

def arrive(*args, **kwargs):
    inside.set()
    go_on.wait()
    original(*args, **kwargs)

Engine.arrive = arrive
thread = threading.Thread(target=lambda: param.sum().backward())
thread.start()
inside.wait()
child = os.fork()  # while the other thread is in the optimizer
if child == 0:
    optimizer.zero_grad()
    param.sum().backward()
    try:
        optimizer.state_dict()
    except RuntimeError as error:
        assert "do not survive fork()" in str(error)
    optimizer.close()
    os._exit(7)
until = time.monotonic() + 60
while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < until:
    time.sleep(0.01)
if ended == (0, 0):
    os.kill(child, 9)
print(os.waitstatus_to_exitcode(ended[1]))
go_on.set()
thread.join()
optimizer.step()
print(optimizer.stats()["steps"])
"""


def test_forked_while_another_thread_is_inside() -> None:
    assert run_python(FORKED).stdout.split() == ["7", "1"]
