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
    train,
    worker_threads,
)


def named(method: str) -> tuple[type, str]:
    """A class of the engine and a method's name, from both with a point between them."""
    owner, _, name = method.partition(".")
    return {each.__name__: each for each in (Engine, Executor, Finisher, Speculator)}[owner], name


def interrupted(method: str, times: int = 1) -> Any:
    """A patch of a method that has Ctrl-C pressed in its middle, so often, the first time it is called."""
    owner, name = named(method)
    original = getattr(owner, name)
    pending = [True]

    def patched(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if pending:
            pending.clear()
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        return result

    return mock.patch.object(owner, name, patched)


def train_both(model: nn.Module, optimizer: AdamW, twin: nn.Module, plain: AdamW, seeds: range) -> None:
    """With the same state in the end."""
    train(model, optimizer, seeds)
    train(twin, plain, seeds)
    assert optimizer.state_digests() == plain.state_digests()
    check_counters(optimizer)


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize(
    "method",
    [
        "Engine._end_all_speculation",
        "Finisher.finish",
        "Engine._move_on",
        "Engine._end_step",
        "Engine.decide",
        "Speculator.expect",
    ],
)
def test_ctrl_c_in_step_comes_out_of_a_finished_step(method: str, times: int) -> None:
    with pair(bucket_numel=1024, max_grad_norm=1.0) as (model, optimizer, twin, plain):
        train(model, optimizer, range(3))
        train(twin, plain, range(4))
        optimizer.zero_grad()
        batch(model, 3).backward()
        if method == "Speculator.expect":  # called in step() only where backward has brought nothing
            optimizer._parts.step.abandon()
        with interrupted(method, times), pytest.raises(KeyboardInterrupt):
            optimizer.step()
        assert optimizer.state_digests() == plain.state_digests()
        assert float(optimizer.state[next(model.parameters())]["step"]) == 4
        train_both(model, optimizer, twin, plain, range(4, 6))


IN_BACKWARD = ["Engine.arrive", "Engine._pack", "Executor.pack", "Speculator._speculate", "Speculator.expect"]
IN_A_SECOND_BACKWARD = ["Engine.retract", "Speculator.undo"]
IN_ZERO_GRAD = ["Engine.abandon", "Engine._take_back"]


@pytest.mark.parametrize("method", [*IN_BACKWARD, *IN_A_SECOND_BACKWARD, *IN_ZERO_GRAD])
def test_ctrl_c_before_step_leaves_the_last_finished_step(method: str) -> None:
    with pair(bucket_numel=1024) as (model, optimizer, twin, plain):
        train_both(model, optimizer, twin, plain, range(3))
        optimizer.zero_grad()
        if method not in IN_BACKWARD:
            batch(model, 4).backward()
        with interrupted(method), pytest.raises(KeyboardInterrupt):
            if method in IN_ZERO_GRAD:
                optimizer.zero_grad()
            else:
                batch(model, 3).backward()
        assert optimizer.state_digests() == plain.state_digests()
        train_both(model, optimizer, twin, plain, range(3, 6))


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


@pytest.mark.parametrize(("error", "then_step"), [(ValueError, True), (KeyboardInterrupt, False)])
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
