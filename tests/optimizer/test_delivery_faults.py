"""``delivery="on_demand"``: workers that fail, Ctrl-C, processes that end or fork with work pending."""

from __future__ import annotations

import signal
from typing import Any
from unittest import mock

import pytest
import torch

from superoffload.errors import WorkerError
from superoffload.links.host import HostLink
from tests.support.adamw_training import run_python
from tests.support.delivery_loops import in_flight, loss_of, made, odd, pending, plain_step


def test_a_worker_that_fails_is_reported_where_it_lands() -> None:
    twin = odd()
    with made(twin, "eager", speculation="never") as eager:
        for seed in range(3):
            plain_step(twin, eager, seed)
        expected = eager.state_digests()
    with in_flight(speculation="never") as (model, optimizer):
        optimizer.synchronize()
        optimizer._engine.pool.inject_fault(1, "a bit fell over")
        plain_step(model, optimizer, 2)
        with pytest.raises(WorkerError, match="a bit fell over"), torch.no_grad():
            loss_of(model, 5)
        assert optimizer.state_digests() == expected, "the step was completed all the same"
        plain_step(model, optimizer, 3)


def test_ctrl_c_while_a_forward_waits() -> None:
    """It comes out once what was waited for has arrived, however often it was pressed."""
    twin = odd()
    with made(twin, "eager", speculation="never") as eager:
        for seed in range(2):
            plain_step(twin, eager, seed)
        expected = eager.state_digests()
        plain_step(twin, eager, 2)
        after = eager.state_digests()
    with in_flight(speculation="never") as (model, optimizer):
        original = HostLink.deliver
        pressed = list[int]()

        def interrupted(link: HostLink, *args: Any) -> Any:
            if not pressed:
                pressed.append(1)
                for _ in range(3):
                    signal.raise_signal(signal.SIGINT)
            return original(link, *args)

        with mock.patch.object(HostLink, "deliver", interrupted), pytest.raises(KeyboardInterrupt):
            loss_of(model, 5)
        assert pending(optimizer)
        assert optimizer.state_digests() == expected
        plain_step(model, optimizer, 2)
        assert optimizer.state_digests() == after


LEAVING = """
import os, sys
import torch, torch._dynamo  # an optimizer loads that
from superoffload import AdamW
from superoffload.errors import StateError
torch.set_num_threads(1)

def in_flight():
    global model, optimizer
    model = torch.nn.Sequential(*(torch.nn.Linear(500, 500) for _ in range(8)))
    optimizer = AdamW(model.parameters(), speculation="never", delivery="on_demand", module=model)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 500)).sum().backward()
        optimizer.step()
    assert optimizer._engine.tail.is_landing

def forking():
    child = os.fork()
    if child == 0:
        for use, text in ((lambda: model(torch.ones(2, 500)), "call synchronize() before fork()"),
                          (optimizer.step, "do not survive fork()")):
            try:
                use()
            except StateError as error:
                assert text in str(error), error
            else:
                os._exit(1)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    model(torch.ones(2, 500))
    assert all(torch.equal(p, optimizer.state[p]["master"]) for p in model.parameters())

def quietly(error):
    sys.stderr = open(os.devnull, "w")
    raise error

for ending in (lambda: sys.exit(3), lambda: quietly(ValueError()), lambda: quietly(KeyboardInterrupt()), forking):
    child = os.fork()
    if child == 0:
        in_flight()
        ending()
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_processes_with_pending_work_end() -> None:
    """By sys.exit, by an error, by Ctrl-C, at their end; a forked child is told what it lacks, its parent goes on."""
    codes = run_python(LEAVING, timeout=200).stdout.split()
    assert codes == ["3", "1", str(-signal.SIGINT), "0"]
