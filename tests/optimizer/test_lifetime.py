"""From construction to the end: closing, forking, leaving, garbage; threads, their names and processors."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from superoffload import AdamW
from superoffload.errors import StateError
from tests.support.adamw_training import (
    assert_worker_threads,
    batch,
    check_counters,
    model_of,
    pair,
    python,
    run_python,
    train,
    weights,
    worker_threads,
)
from tests.support.engine_rig import COUNTERS

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: looks at threads in /proc")


# ---- threads ------------------------------------------------------------------------------------------------------


@on_linux
def test_threads_are_named_bound_give_way_and_end_with_close() -> None:
    before = set(worker_threads())
    allowed = sorted(os.sched_getaffinity(0))
    optimizer = AdamW(model_of().parameters(), threads=len(allowed) + 1)
    try:
        expected = {f"superoffload-{i}": ({cpu}, os.SCHED_BATCH) for i, cpu in enumerate(allowed)}
        # More threads than processors: not bound.
        expected[f"superoffload-{len(allowed)}"] = (set(allowed), os.SCHED_BATCH)
        found: dict[str, tuple[set[int], int]] = {}
        until = time.monotonic() + 60  # they name and bind themselves as they start
        while found != expected and time.monotonic() < until:
            found = {
                Path(f"/proc/self/task/{thread}/comm").read_text().strip(): (
                    os.sched_getaffinity(thread),
                    os.sched_getscheduler(thread),
                )
                for thread in set(worker_threads()) - before
            }
        assert found == expected
    finally:
        optimizer.close()
    assert_worker_threads(before)


@on_linux
def test_threads_stay_within_the_processes_affinity() -> None:
    script = """
import os, time
os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
from tests.support.adamw_training import model_of, worker_threads
from superoffload import AdamW
optimizer = AdamW(model_of().parameters())
until = time.monotonic() + 60  # they name and bind themselves as they start
allowed = [os.sched_getaffinity(0)]
while (found := [os.sched_getaffinity(thread) for thread in worker_threads()]) != allowed and time.monotonic() < until:
    time.sleep(0.001)
print(found == allowed)
"""
    assert run_python(script).stdout.split() == ["True"]


# ---- close --------------------------------------------------------------------------------------------------------


def test_close_takes_back_speculation_and_leaves_the_state_readable() -> None:
    model = model_of(torch.bfloat16)
    optimizer = AdamW(model.parameters(), speculation="always")
    train(model, optimizer, range(3))
    before, state = optimizer.state_digests(), optimizer.state_dict()
    batch(model, 5).backward()
    optimizer.close()
    optimizer.close()
    assert optimizer.state_digests() == before
    after = optimizer.state_dict()
    for position, values in state["state"].items():
        assert all(torch.equal(after["state"][position][name], value) for name, value in values.items())
    assert optimizer.stats()["buckets_abandoned"] == 1
    check_counters(optimizer)


def test_use_after_close() -> None:
    model = model_of()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, range(1))
    optimizer.close()
    before = weights(model)
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
    assert torch.equal(weights(model), before)


def test_backward_and_zero_grad_after_close_are_those_of_torch() -> None:
    model = model_of()
    with AdamW(model.parameters(), speculation="always") as optimizer:
        pass
    batch(model, 0).backward()
    assert all(p.grad is not None for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    assert optimizer.stats()["bytes_down"] == 0, "its hooks are gone"


# ---- copies, garbage ----------------------------------------------------------------------------------------------


def test_copies_are_refused() -> None:
    with AdamW(model_of().parameters()) as optimizer:
        for operation in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(StateError, match=r"cannot be copied or pickled; save its state_dict\(\)"):
                operation(optimizer)


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


# ---- the end of the process ---------------------------------------------------------------------------------------


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


def test_a_script_ends_quietly(tmp_path: Path) -> None:
    """Its optimizer is a global of a module, and goes when ours have gone."""
    script = tmp_path / "script.py"
    script.write_text("""
import superoffload, torch
model = torch.nn.Linear(4, 4)
optimizer = superoffload.AdamW(model.parameters(), max_grad_norm=1.0)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
""")
    assert run_python(f"import runpy; runpy.run_path({str(script)!r})").returncode == 0
    done = python().run([str(script)])
    assert (done.returncode, done.stderr) == (0, "")


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


@on_linux
def test_a_forked_child_gets_an_error_and_the_parent_goes_on() -> None:
    endings = ["os._exit(7)", "pass", "optimizer.close()", "del optimizer"]
    assert run_python(FORK.replace("ENDINGS", str(endings))).stdout.split() == ["7"] * 4 + ["1", "True"]


# ---- the rest -------------------------------------------------------------------------------------------------------


def test_stats_of_a_known_run() -> None:
    with pair(bucket_numel=1 << 20) as (model, optimizer, twin, plain):
        numel = weights(model).numel()
        for one, its in ((model, optimizer), (twin, plain)):
            train(one, its, range(2))
        optimizer.zero_grad()
        batch(model, 2).backward()
        optimizer.max_grad_norm = 1e-3
        optimizer.step()
        optimizer.zero_grad()
        optimizer.max_grad_norm = None
        batch(model, 3).backward()
        optimizer.zero_grad()
        stats = optimizer.stats()
        expected = dict.fromkeys(COUNTERS, 0) | {
            "steps": 3,
            "skipped_steps": 0,
            "clipped_steps": 1,
            "buckets_speculated": 4,
            "buckets_stepped": 0,
            "buckets_committed": 2,
            "buckets_replayed": 1,
            "buckets_abandoned": 1,
        }
        assert {name: stats[name] for name in expected} == expected
        assert stats["clip_rate"] == 1 / 3
        assert stats["bytes_down"] == 4 * 4 * numel
        assert stats["bytes_up"] == 3 * 4 * numel
        assert 1.0 < stats["journal_bytes_per_param"] < 4
        assert 3 * numel <= stats["journal_bytes"]
        assert 0 < stats["optimizer_seconds_exposed"] <= stats["optimizer_seconds"]
        assert plain.stats()["buckets_stepped"] == 2
        assert plain.stats()["journal_bytes"] == 0


def test_one_that_cannot_be_closed_leaves_no_other_open_when_the_process_ends(tmp_path: Path) -> None:
    script = """
import sys, torch
from superoffload import AdamW

def bad() -> None:
    raise ValueError("as told")

kept = []
for index in range(6):
    kept.append(AdamW([torch.nn.Parameter(torch.ones(4))], threads=1, trace=f"{sys.argv[1]}/{index}.json"))
    if index % 2:
        kept[-1].close, kept[-1].__class__.__del__ = bad, lambda self: None
"""
    done = python().run(["-c", script, str(tmp_path)])
    assert "ValueError: as told" in done.stderr
    for index in (0, 2, 4):
        json.loads((tmp_path / f"{index}.json").read_text())
