"""However many ``CPUAdamW`` a process has, those of one number of threads share them; the last one ends them."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

import superoffload
from tests.support.adamw_training import assert_worker_threads, run_python, worker_threads, worker_threads_when

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: counts threads in /proc, forks a process")


def optimizer_of(numel: int, threads: int, seed: int = 0) -> superoffload.CPUAdamW:
    generator = torch.Generator().manual_seed(seed)
    param = torch.nn.Parameter(torch.randn(numel, generator=generator))
    param.grad = torch.randn(numel, generator=generator)
    return superoffload.CPUAdamW([param], threads=threads)


def result_of(optimizer: superoffload.CPUAdamW) -> torch.Tensor:
    return torch.Tensor(optimizer.param_groups[0]["params"][0].detach())


def test_fifty_have_the_threads_of_one() -> None:
    before = set(worker_threads())
    many = [optimizer_of(70_000, threads=3) for _ in range(50)]
    mine = worker_threads_when(len(before) + 2) - before
    for optimizer in many:
        optimizer.step()
    other = optimizer_of(100, threads=2)
    worker_threads_when(len(before) + 3)
    other.close()
    for optimizer in many[:-1]:
        optimizer.close()
    assert_worker_threads(before | mine)
    many[-1].step()  # one that was closed has not ended the others' threads
    many[-1].close()
    assert_worker_threads(before)


def test_two_threads_of_python_step_two_at_the_same_time() -> None:
    alone = [optimizer_of(300_000, threads=2, seed=seed) for seed in range(2)]
    together = [optimizer_of(300_000, threads=2, seed=seed) for seed in range(2)]
    start = threading.Barrier(2)

    def steps(optimizer: superoffload.CPUAdamW) -> None:
        start.wait(30)
        for _ in range(20):
            optimizer.step()

    for optimizer in alone:
        for _ in range(20):
            optimizer.step()
    running = [threading.Thread(target=steps, args=(optimizer,)) for optimizer in together]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(60)
        assert not thread.is_alive()
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(result_of(one), result_of(other))
    for optimizer in (*alone, *together):
        optimizer.close()


def test_a_forked_child_starts_threads_of_its_own() -> None:
    script = """
import os, sys, torch, superoffload
from tests.support.adamw_training import worker_threads_when

def one():
    param = torch.nn.Parameter(torch.ones(70_000))
    param.grad = torch.ones(70_000)
    return param, superoffload.CPUAdamW([param], threads=2)

first, optimizer = one()
optimizer.step()
if os.fork() == 0:
    second, own = one()
    own.step()
    right = torch.equal(first, second) and len(worker_threads_when(1)) == 1
    own.close()
    optimizer.close()
    os._exit(7 if right else 1)
print(os.waitstatus_to_exitcode(os.wait()[1]))
optimizer.step()
print(len(worker_threads_when(1)))
optimizer.close()
"""
    assert run_python(script, timeout=60).stdout.split() == ["7", "1"]
