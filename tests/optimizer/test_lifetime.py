"""From construction to the end: closing, forking, leaving, garbage; threads, their names and processors."""

from __future__ import annotations

import gc
import os
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
from superoffload.engine.stepping import Finisher
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


IN_FLIGHT = """
import atexit, sys
atexit.register(lambda: print(optimizer.state_digests() == before))  # first in, last out
import torch
from superoffload import AdamW
param = torch.nn.Parameter(torch.ones(2_000_000))
optimizer = AdamW([param], speculation="always", bucket_numel=1 << 18)
before = optimizer.state_digests()
param.sum().backward()
assert optimizer.stats()["buckets_speculated"] > 0
sys.exit(3)
"""


def test_leaving_with_work_in_flight() -> None:
    done = run_python(IN_FLIGHT)
    assert (done.returncode, done.stdout) == (3, "True\n")


FORK = """
import os, sys, torch
from superoffload import AdamW
from superoffload.errors import StateError
param = torch.nn.Parameter(torch.ones(1000))
optimizer = AdamW([param], speculation="always")
param.square().sum().backward()

def in_child():
    for use in (optimizer.step, optimizer.state_dict, optimizer.state_digests, optimizer.synchronize):
        try:
            use()
        except StateError as error:
            assert "do not survive fork()" in str(error), error
        else:
            raise AssertionError("no error")
    optimizer.zero_grad()
    param.square().sum().backward()  # its hook is quiet

for ending in ENDINGS:
    child = os.fork()
    if child == 0:
        in_child()
        exec(ending)
        sys.exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
optimizer.step()
print(int(optimizer.state[param]["step"]))
twin = torch.nn.Parameter(torch.ones(1000))
plain = AdamW([twin], speculation="never")
twin.square().sum().backward()
plain.step()
print(optimizer.state_digests() == plain.state_digests())
"""


def test_a_forked_child_gets_an_error_and_the_parent_goes_on() -> None:
    endings = ["os._exit(7)", "pass", "optimizer.close()", "del optimizer"]
    assert run_python(FORK.replace("ENDINGS", str(endings))).stdout.split() == ["7"] * 4 + ["1", "True"]


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
