"""A worker thread that fails: a WorkerError, a state that is one of the two the promise allows, and life goes on."""

from __future__ import annotations

import re
import sys
from dataclasses import replace

import pytest
import torch

from superoffload import AdamW
from superoffload.engine.bucket import GroupHyper
from superoffload.errors import StateError, WorkerError
from tests.support.adamw_training import run_python
from tests.support.engine_rig import COUNTERS, Settings, rig

HYPER = GroupHyper(1e-2, 0.9, 0.99, 1e-8, 0.1)


ENDS = [
    *((end, "always", 0) for end in ("verdict", "replay", "undo, then step", "abandon", "quiesce", "digests")),
    *(("verdict", "always", 2), ("step", "never", 0), ("retract", "always", 0), ("restore", "always", 0)),
    ("await_speculation", "always", 0),
]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(Settings([[1024, 1024, 500]], bucket_numel=1024, hyper=HYPER), id="three buckets"),
        pytest.param(Settings([[200_000]], bucket_numel=1 << 20, threads=3, hyper=HYPER), id="one bucket, many chunks"),
    ],
)
@pytest.mark.parametrize(("end", "mode", "chunk"), ENDS)
def test_a_fault_at_every_end_of_a_bucket(settings: Settings, end: str, mode: str, chunk: int) -> None:
    """While speculating the step is abandoned; behind the verdict, and while undoing, what was begun is completed."""
    with rig(replace(settings, mode=mode)) as made:
        for _ in range(2):  # behind them journals have escapes, since moments are not all zero
            made.step_both(made.backward())
            made.check()
        before = end in ("verdict", "await_speculation")
        if before:
            made.engine.pool.inject_fault(chunk, "a bit fell over")
        gradients = made.backward()
        if not before:
            for bucket in made.engine.buckets:
                if bucket.running is not None:
                    bucket.running.wait()
            made.engine.pool.inject_fault(chunk, "a bit fell over")
        if end == "undo, then step":
            made.set_hyper(0, replace(HYPER, lr=0.5))
        with pytest.raises(WorkerError, match="a bit fell over"):
            if end == "verdict":
                made.engine.apply(made.engine.decide(unscale=1.0, max_grad_norm=None))
            elif end in ("step", "replay", "undo, then step"):
                made.step_both(gradients, max_grad_norm=1.0 if end == "replay" else None)
            else:
                getattr(made.engine, end)(*made.shards[: end in ("retract", "restore")])
        if before:
            assert not made.engine.is_filling
        if end not in ("step", "replay", "undo, then step"):  # the same gradients once more: applied once
            for shard in reversed(made.shards):
                if not made.engine.has_gradient(shard):
                    made.arrive(shard, gradients[shard.index])
            made.step_both(gradients)
        made.check()
        for max_grad_norm in (None, 1.0):
            made.step_both(made.backward(), max_grad_norm=max_grad_norm)
            made.check()


def test_the_optimizer_reports_it_and_can_step_again() -> None:
    torch.manual_seed(0)
    ours = torch.nn.Parameter(torch.randn(1000))
    theirs = torch.nn.Parameter(ours.detach().clone())
    with AdamW([ours], speculation="always") as optimizer, AdamW([theirs], speculation="never") as plain:
        for fault in (False, True, False):
            for parameter in (ours, theirs):
                parameter.grad = None
            if fault:
                optimizer._engine.pool.inject_fault(0, "a bit fell over")
            ours.square().sum().backward()
            theirs.square().sum().backward()
            if fault:
                before, version = ours.detach().clone(), ours._version
                with pytest.raises(WorkerError, match="a bit fell over"):
                    optimizer.step()
                assert torch.equal(ours, before)
                assert ours._version == version
            optimizer.step()  # as in torch, gradients that are still there are applied
            plain.step()
            assert optimizer.state_digests() == plain.state_digests()
        assert float(optimizer.state[ours]["step"]) == 3.0
        stats = optimizer.stats()
        assert stats["buckets_undone"] == 1
        assert stats["buckets_speculated"] == sum(stats[name] for name in COUNTERS)


def test_a_fault_that_a_second_backward_meets_comes_out_of_backward() -> None:
    parameter = torch.nn.Parameter(torch.ones(1000))
    twin = torch.nn.Parameter(torch.ones(1000))
    with AdamW([parameter], speculation="always") as optimizer, AdamW([twin], speculation="never") as plain:
        optimizer._engine.pool.inject_fault(0, "a bit fell over")
        parameter.square().sum().backward()
        with pytest.raises(WorkerError, match="a bit fell over"):
            parameter.square().sum().backward()
        with pytest.raises(StateError, match=r"a bit fell over.*gradients are missing"):
            optimizer.step()
        optimizer.zero_grad()
        (2 * parameter.square()).sum().backward()
        optimizer.step()
        (2 * twin.square()).sum().backward()
        plain.step()
        assert optimizer.state_digests() == plain.state_digests()


REFUSED = """
import resource
import torch
from torch import nn
from superoffload import AdamW, CPUAdamW
from superoffload.errors import SuperOffloadError

pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (100 << 20),) * 2)
for kind in (AdamW, CPUAdamW):
    try:
        kind([nn.Parameter(torch.zeros(8))], threads=200)
    except SuperOffloadError as error:
        print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and a limit on the address space, which Linux keeps")
def test_threads_that_the_system_refuses_are_an_error() -> None:
    done = run_python(REFUSED)
    lines = done.stdout.splitlines()
    refused = re.compile(r"threads=(200|199): the system started only \d+ of")  # CPUAdamW's calling thread is the 200th
    assert len(lines) == 2 and all(map(refused.match, lines))
