"""A worker thread that fails: a WorkerError, a state that is one of the two the promise allows, and life goes on."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from superoffload import AdamW
from superoffload.errors import WorkerError
from tests.support.adamw_training import run_python
from tests.support.fake_cuda import on_host

Use = Callable[[AdamW, torch.nn.Parameter], object]
USES: dict[str, Use] = {
    "a step": lambda optimizer, parameter: optimizer.step(),
    "a second backward": lambda optimizer, parameter: parameter.square().sum().backward(),
    "an abandoned step": lambda optimizer, parameter: optimizer.zero_grad(),
    "a look": lambda optimizer, parameter: optimizer.state_digests(),
}
FAULTS = [
    *(("behind backward", "always", use, 1e6) for use in USES if use != "a step"),
    *(("in backward", "always", "a step", 1e6), ("behind backward", "always", "a step", 1.0)),  # committed, replayed
    ("behind backward", "never", "a step", 1e6),
]


@pytest.mark.parametrize(("when", "mode", "use", "clip"), FAULTS)
@pytest.mark.parametrize("chunk", [0, 2])
def test_a_fault_in_one_of_many_chunks(when: str, mode: str, use: str, clip: float, chunk: int) -> None:
    """While speculating the step is abandoned; behind the verdict, and while undoing, what was begun is completed."""
    ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 200_000)) for _ in range(2))
    options: dict[str, Any] = {"lr": 1e-2, "threads": 3, "bucket_numel": 1 << 20}
    with on_host(), AdamW([ours], speculation=mode, **options) as optimizer, AdamW([theirs], **options) as plain:

        def step(its: AdamW, parameter: torch.nn.Parameter) -> None:
            its.zero_grad()
            parameter.square().sum().backward()
            its.step()

        for _ in range(2):  # behind them the journal has escapes, since moments are not all zero
            step(optimizer, ours)
            step(plain, theirs)
        optimizer.zero_grad()
        optimizer.max_grad_norm = plain.max_grad_norm = 1e6
        if when == "in backward":
            optimizer._engine.pool.inject_fault(chunk, "a bit fell over")
        ours.square().sum().backward()
        if when == "behind backward":
            for bucket in optimizer._engine.buckets:
                if bucket.running is not None:
                    bucket.running.wait()
            optimizer._engine.pool.inject_fault(chunk, "a bit fell over")
        optimizer.max_grad_norm = plain.max_grad_norm = clip
        with pytest.raises(WorkerError, match="a bit fell over"):
            USES[use](optimizer, ours)
        if optimizer.stats()["steps"] == 2:  # it was given up
            step(optimizer, ours)
        step(plain, theirs)
        for _ in range(2):
            assert optimizer.state_digests() == plain.state_digests()
            step(optimizer, ours)
            step(plain, theirs)


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
