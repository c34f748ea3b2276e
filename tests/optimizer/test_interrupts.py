"""Ctrl-C, other signals and exceptions at any moment of a step: nothing is lost, doubled or half-applied."""

from __future__ import annotations

import gc
import signal
from typing import Any
from unittest import mock

import pytest
from torch import Tensor, nn

from superoffload import AdamW
from superoffload.engine.engine import Engine
from superoffload.engine.executor import Executor
from superoffload.engine.finisher import Finisher
from superoffload.engine.speculator import Speculator
from superoffload.errors import StateError
from tests.support.adamw_training import (
    Optimizer,
    assert_worker_threads,
    batch,
    check_counters,
    check_scenario,
    model_of,
    pair,
    run_python,
    train,
    worker_threads,
)
from tests.support.engine_rig import COUNTERS


def named(method: str) -> tuple[type, str]:
    """A class of the engine and a method's name, from both with a point between them."""
    owner, _, name = method.partition(".")
    return {each.__name__: each for each in (Engine, Executor, Finisher, Speculator)}[owner], name


def interrupted_once(method: str) -> Any:
    """A patch of a method that lets Ctrl-C come in its middle, the first time it is called."""
    owner, name = named(method)
    original = getattr(owner, name)
    pending = [True]

    def patched(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if pending:
            pending.clear()
            signal.raise_signal(signal.SIGINT)
        return result

    return mock.patch.object(owner, name, patched)


IN_A_STEP = ["Engine._end_all_speculation", "Finisher.finish", "Engine._move_on", "Engine._end_step"]


@pytest.mark.parametrize("method", [*IN_A_STEP, "Engine.decide", "Speculator.expect"])
def test_ctrl_c_in_step_comes_out_of_a_finished_step(method: str) -> None:
    with pair(bucket_numel=1024, max_grad_norm=1.0) as (model, optimizer, twin, plain):
        train(model, optimizer, range(3))
        train(twin, plain, range(4))
        optimizer.zero_grad()
        batch(model, 3).backward()
        if method == "Speculator.expect":  # called in step() only where backward has brought nothing
            optimizer._parts.step.abandon()
        with interrupted_once(method), pytest.raises(KeyboardInterrupt):
            optimizer.step()
        assert optimizer.state_digests() == plain.state_digests()
        assert float(optimizer.state[next(model.parameters())]["step"]) == 4
        train(model, optimizer, range(4, 6))
        train(twin, plain, range(4, 6))
        assert optimizer.state_digests() == plain.state_digests()
        check_counters(optimizer)


@pytest.mark.parametrize(
    "method", ["Engine.arrive", "Engine._pack", "Executor.pack", "Speculator._speculate", "Speculator.expect"]
)
def test_ctrl_c_in_backward_leaves_the_last_finished_step(method: str) -> None:
    with pair(bucket_numel=1024) as (model, optimizer, twin, plain):
        for one, its in ((model, optimizer), (twin, plain)):
            train(one, its, range(3))
        optimizer.zero_grad()
        with interrupted_once(method), pytest.raises(KeyboardInterrupt):
            batch(model, 3).backward()
        assert optimizer.state_digests() == plain.state_digests()
        for one, its in ((model, optimizer), (twin, plain)):
            train(one, its, range(3, 6))
        assert optimizer.state_digests() == plain.state_digests()
        check_counters(optimizer)


@pytest.mark.parametrize("method", ["Engine.retract", "Speculator.undo", "Engine.abandon", "Engine._take_back"])
def test_ctrl_c_while_speculation_is_taken_back(method: str) -> None:
    with pair(bucket_numel=1024) as (model, optimizer, twin, plain):
        for one, its in ((model, optimizer), (twin, plain)):
            train(one, its, range(3))
        batch(model, 3).backward()
        with interrupted_once(method), pytest.raises(KeyboardInterrupt):
            if method in ("Engine.abandon", "Engine._take_back"):
                optimizer.zero_grad()
            else:
                batch(model, 4).backward()
        assert optimizer.state_digests() == plain.state_digests()
        for one, its in ((model, optimizer), (twin, plain)):
            train(one, its, range(3, 6))
        assert optimizer.state_digests() == plain.state_digests()
        check_counters(optimizer)


@pytest.mark.parametrize("method", IN_A_STEP)
def test_pressed_often_it_still_comes_out_of_a_finished_step(method: str) -> None:
    owner, name = named(method)
    original = getattr(owner, name)

    def pressed_often(*args: Any, **kwargs: Any) -> Any:
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
        return original(*args, **kwargs)

    with pair(bucket_numel=1024, max_grad_norm=1.0) as (model, optimizer, twin, plain):
        train(model, optimizer, range(3))
        train(twin, plain, range(4))
        optimizer.zero_grad()
        batch(model, 3).backward()
        with mock.patch.object(owner, name, pressed_often), pytest.raises(KeyboardInterrupt):
            optimizer.step()
        assert optimizer.state_digests() == plain.state_digests()
        train(model, optimizer, range(4, 6))
        train(twin, plain, range(4, 6))
        assert optimizer.state_digests() == plain.state_digests()
        check_counters(optimizer)


def test_an_error_from_the_middle_makes_the_optimizer_say_so() -> None:
    gc.collect()  # what other tests have left
    threads = set(worker_threads())
    model = model_of()
    optimizer = AdamW(model.parameters(), speculation="always")
    train(model, optimizer, range(2))
    batch(model, 3).backward()

    with mock.patch.object(Finisher, "finish", side_effect=MemoryError("as told")), pytest.raises(MemoryError):
        optimizer.step()
    for use in (optimizer.step, optimizer.state_dict, optimizer.state_digests, optimizer.synchronize):
        with pytest.raises(StateError, match="interrupted in the middle") as caught:
            use()
        assert isinstance(caught.value.__cause__, MemoryError), "also where the first one was lost with its thread"
    batch(model, 4).backward()
    optimizer.close()
    assert_worker_threads(threads)


def test_handlers_are_back_afterwards() -> None:
    seen: list[int] = []
    handler = signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
        mine = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
        with pair() as (model, optimizer, _, _):
            train(model, optimizer, range(1))
            assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == mine
            batch(model, 1).backward()
            original = Finisher.finish

            def terminated(*args: Any) -> None:
                signal.raise_signal(signal.SIGTERM)
                assert not seen, "it waits until the step is done"
                original(*args)

            with mock.patch.object(Finisher, "finish", terminated):
                optimizer.step()
        assert seen == [signal.SIGTERM]
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == mine
    finally:
        signal.signal(signal.SIGTERM, handler)


HAMMERED = """
import os, random, signal, threading, time, torch
torch.set_num_threads(1)
from superoffload import AdamW
STEPS = 150
gradients = [torch.randn(3000, generator=torch.Generator().manual_seed(i)) for i in range(STEPS)]

def run(mode, hammer):
    params = [torch.nn.Parameter(torch.ones(1000)) for _ in range(3)]
    optimizer = AdamW(params, speculation=mode, bucket_numel=1024, max_grad_norm=54.0, threads=2)
    interrupts = answered = 0
    caught = threading.Semaphore(0)
    def shoot():
        rng = random.Random(1)
        while hammer:
            time.sleep(rng.random() * 0.01)
            os.kill(os.getpid(), signal.SIGINT)
            caught.acquire(timeout=10)  # one at a time; on, where Python has swallowed one, which stderr tells
    thread = threading.Thread(target=shoot, daemon=True)
    while True:
        try:
            if hammer and not thread.is_alive():
                thread.start()
            if answered < interrupts:  # in here: the next one may come at once
                answered += 1
                caught.release()
            while (step := optimizer.stats()["steps"]) < STEPS:
                optimizer.zero_grad()
                (torch.cat(params) * gradients[step]).sum().backward()
                optimizer.step()
            if hammer:
                hammer = False
                thread.join()
            return optimizer.state_digests(), interrupts, optimizer
        except KeyboardInterrupt:
            interrupts += 1

plain, _, _ = run("never", False)
hammered, interrupts, optimizer = run("always", True)
stats = optimizer.stats()
print(plain == hammered, interrupts > 0, stats["buckets_speculated"] > 0)
COUNTERS
"""


def test_many_interrupts_at_random_moments() -> None:
    """Each training step is retried until it is done; in the end nothing was lost, doubled or half-applied."""
    counters = f"print(stats['buckets_speculated'] == sum(stats[name] for name in {COUNTERS}))"
    assert run_python(HAMMERED.replace("COUNTERS", counters)).stdout.split() == ["True"] * 4


def test_an_exception_between_backward_and_step() -> None:
    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        for seed in range(4):
            optimizer.zero_grad()
            try:
                batch(model, seed).backward()
                if seed % 2:
                    raise ValueError("the user's")
                optimizer.step()
            except ValueError:
                continue

    assert check_scenario(scenario)["buckets_abandoned"] == 2  # by zero_grad(), and the last one by close()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("then_step", [False, True])
def test_an_exception_in_the_middle_of_backward(error: type[BaseException], then_step: bool) -> None:
    """With step() after it, the gradients that had arrived are applied, as in torch."""

    def scenario(model: Any, optimizer: Optimizer) -> None:
        train(model, optimizer, range(2))
        optimizer.zero_grad()

        def fail(grad: Tensor) -> None:
            raise error("the user's")

        handle = model[2].weight.register_hook(fail)
        with pytest.raises(error, match="the user's"):
            batch(model, 7).backward()
        handle.remove()
        if then_step:
            optimizer.step()
        train(model, optimizer, range(3))

    check_scenario(scenario, bucket_numel=1024)
