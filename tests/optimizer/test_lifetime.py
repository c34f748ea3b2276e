"""From construction to the end: closing, forking, leaving, garbage; threads, their names and processors."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from superoffload import AdamW
from superoffload.engine.after_verdict import Finisher
from superoffload.errors import StateError
from tests.support.adamw_training import (
    assert_worker_threads,
    batch,
    check_counters,
    model_of,
    run_python,
    train,
    weights,
    worker_threads,
)


def test_threads_are_named_bound_give_way_and_end_with_close() -> None:
    before, allowed = set(worker_threads()), sorted(os.sched_getaffinity(0))
    expected = {f"superoffload-{i}": ({cpu}, os.SCHED_BATCH) for i, cpu in enumerate(allowed)}
    expected[f"superoffload-{len(allowed)}"] = (set(allowed), os.SCHED_BATCH)  # more threads than processors: not bound

    def shown(thread: int) -> tuple[str, Any]:
        name = Path(f"/proc/self/task/{thread}/comm").read_text().strip()
        return name, (os.sched_getaffinity(thread), os.sched_getscheduler(thread))

    with AdamW(model_of().parameters(), threads=len(allowed) + 1):
        found: dict[str, Any] = {}
        until = time.monotonic() + 60  # they name and bind themselves as they start
        while found != expected and time.monotonic() < until:
            found = dict(map(shown, set(worker_threads()) - before))
        assert found == expected
    assert_worker_threads(before)


def test_close_takes_back_speculation_leaves_the_state_readable_and_ends_all_use() -> None:
    model = model_of()
    optimizer = AdamW(model.parameters(), speculation="always")
    train(model, optimizer, range(3))
    before, state, values = optimizer.state_digests(), optimizer.state_dict(), weights(model)
    optimizer.zero_grad()
    batch(model, 5).backward()
    optimizer.close()
    optimizer.close()
    assert optimizer.state_digests() == before and str(optimizer.state_dict()) == str(state)
    assert optimizer.stats()["buckets_abandoned"] == 1
    check_counters(optimizer)
    uses: list[Callable[[], object]] = [
        optimizer.step,
        optimizer.refresh_masters,
        lambda: optimizer.load_state_dict(optimizer.state_dict()),
        lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]}),
    ]
    for use in uses:
        with pytest.raises(StateError, match="the optimizer is closed; make a new one"):
            use()
    assert len(optimizer.param_groups) == 1
    down = optimizer.stats()["bytes_down"]
    batch(model, 1).backward()
    assert all(p.grad is not None for p in model.parameters()) and optimizer.stats()["bytes_down"] == down
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(weights(model), values)


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_garbage(in_a_cycle: bool) -> None:
    """Threads end, speculation is taken back, hooks are gone or quiet, nothing is written to freed memory."""
    gc.collect()  # what other tests have left
    threads = set(worker_threads())
    model = model_of()
    for in_flight in (True, True, False):
        optimizer = AdamW(model.parameters(), speculation="always", threads=2)
        train(model, optimizer, range(1))
        if in_flight:
            batch(model, 5).backward()
        masters = [optimizer.state[p]["master"] for p in model.parameters()]
        gone, engine = weakref.ref(optimizer), weakref.ref(optimizer._engine)
        if in_a_cycle:
            optimizer.param_groups[0]["me"] = optimizer
        del optimizer
        if in_a_cycle:
            gc.collect()
        assert gone() is None, "nothing else keeps it"
        assert engine() is None, "nor what it owns, and its parts do not keep each other"
        assert_worker_threads(threads)
        assert torch.equal(torch.cat([m.reshape(-1) for m in masters]), weights(model))
        if not in_a_cycle:  # there, handles do not know any more what they belong to
            assert not any(getattr(p, "_post_accumulate_grad_hooks", None) for p in model.parameters())
    before = weights(model)
    batch(model, 6).backward()
    assert torch.equal(weights(model), before)


LEAVING = """
import atexit, os, sys
atexit.register(lambda: print(optimizer.state_digests() == before) if os.getpid() == trains else None)  # it runs last
import torch, torch._dynamo  # an optimizer loads that
from functools import partial
from superoffload import AdamW
from superoffload.errors import StateError
torch.set_num_threads(1)
trains = 0

def made(speculation, delivery):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(4)))
    return model, AdamW(model.parameters(), speculation=speculation, delivery=delivery, module=model, threads=2)

def backward(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 300)).sum().backward()

def in_flight(delivery):
    global model, optimizer, before, trains
    model, optimizer = made("always" if delivery == "eager" else "never", delivery)
    before = optimizer.state_digests()
    trains = os.getpid() if delivery == "eager" else 0
    backward(model, optimizer)
    if delivery == "on_demand":
        for _ in range(2):
            optimizer.step()
            backward(model, optimizer)
        optimizer.step()
    assert optimizer._engine.last_step.is_landing or optimizer.stats()["buckets_speculated"]

def refused(use, text):
    try:
        use()
    except StateError as error:
        assert text in str(error), error
    else:
        os._exit(1)

def forking(delivery, ending):
    global before
    child = os.fork()
    if child == 0:
        if delivery == "on_demand":
            refused(lambda: model(torch.ones(2, 300)), "call synchronize() before fork()")
        for use in (optimizer.step, optimizer.state_dict, optimizer.state_digests, optimizer.synchronize):
            refused(use, "do not survive fork()")
        if delivery == "eager":
            backward(model, optimizer)  # its hook is quiet
        exec(ending, globals())
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    if delivery == "on_demand":
        model(torch.ones(2, 300))
        assert all(torch.equal(p, optimizer.state[p]["master"]) for p in model.parameters())
    else:
        optimizer.step()
        twin, plain = made("never", delivery)
        backward(twin, plain)
        plain.step()
        before = plain.state_digests()

def quietly(error):
    sys.stderr = open(os.devnull, "w")
    raise error

for delivery in ("eager", "on_demand"):
    endings = [lambda: sys.exit(3), lambda: quietly(ValueError()), lambda: quietly(KeyboardInterrupt())]
    for how in ("os._exit(7)", "pass", "optimizer.close()", "del optimizer")[:4 if delivery == "eager" else 1]:
        endings.append(partial(forking, delivery, how))
    for ending in endings:
        child = os.fork()
        if child == 0:
            in_flight(delivery)
            ending()
            sys.exit()
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_leaving_with_work_in_flight() -> None:
    """By sys.exit, by an error, by Ctrl-C, at the end. What is speculated is taken back. A forked child gets an error,
    however it ends, and its parent goes on."""
    said = run_python(LEAVING, timeout=200).stdout.split()
    interrupted = str(-signal.SIGINT)
    eager = ["True", "3", "True", "1", "True", interrupted, *["True", "0"] * 4]
    assert said == [*eager, "3", "1", interrupted, "0"]


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
