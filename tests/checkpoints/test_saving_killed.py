"""Processes killed by SIGKILL while they save: the checkpoint before loads, and there is no half one."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from superoffload import AdamW, checkpoints
from tests.convergence.local_ranks import PRELOAD
from tests.support.adamw_training import batch, model_of
from tests.support.fake_cuda import Fake
from tests.support.over_stand_in import check_links, only_over_stand_in, over_stand_in

_CALLS = ("open", "pwrite", "fsync", "rename", "truncate", "mkdir", "close")


def one_step(model: Any, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    batch(model, step).backward()
    optimizer.step()


def train_and_save(root: str, steps: int, kill_at: int | None, background: bool, link: str = "host") -> None:
    """In a child: a checkpoint after every step; kills itself at the ``kill_at``th call to the system below."""
    torch.set_num_threads(1)
    if link == "host":
        save_steps(root, steps, kill_at, background)
    else:
        with over_stand_in(Fake()) as links:
            save_steps(root, steps, kill_at, background, lambda: check_links(links))
    os._exit(0)


def save_steps(
    root: str, steps: int, kill_at: int | None, background: bool, check: Callable[[], None] = lambda: None
) -> None:
    model = model_of()
    optimizer = AdamW(model.parameters(), threads=1, max_grad_norm=1.0)
    if kill_at is not None:
        count_calls(kill_at)
    for step in range(1, steps + 1):
        one_step(model, optimizer, step)
        check()
        with open(f"{root}/digests-{step}", "w") as file:
            json.dump(optimizer.state_digests(), file)
        if background:
            checkpoints.save_in_background(f"{root}/step-{step}", model, optimizer, keep=2)
        else:
            checkpoints.save(f"{root}/step-{step}", model, optimizer, keep=2)
    optimizer.await_snapshots()
    optimizer.close()


def count_calls(kill_at: int) -> None:
    made = 0
    for name in _CALLS:
        real = getattr(os, name)

        def counted(*args: Any, real: Any = real, **options: Any) -> Any:
            nonlocal made
            made += 1
            if made == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        setattr(os, name, counted)


def start(root: Path, *arguments: Any) -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=train_and_save, args=(str(root), *arguments), daemon=True)
    process.start()
    return process


def check_what_is_left(root: Path) -> int:
    """The number of the newest checkpoint; it and the one before it load, and a run goes on from there."""
    model = model_of(seed=8)
    newest = 0
    with AdamW(model.parameters(), threads=1, max_grad_norm=1.0) as optimizer:
        for folder in root.glob("step-*"):
            step = int(folder.name.split("-")[1])
            checkpoints.load(folder, model, optimizer)
            assert optimizer.state_digests() == json.loads((root / f"digests-{step}").read_text())
            newest = max(newest, step)
        found = checkpoints.latest(root)
        assert (0 if found is None else int(found.name.split("-")[1])) == newest
        one_step(model, optimizer, newest + 1)
        checkpoints.save(root / "step-9", model, optimizer, keep=9)  # sweeps what was left
        assert not list(root.glob(".writing-*"))
    return newest


@pytest.mark.over_stand_in
@only_over_stand_in(background=False)
@pytest.mark.parametrize("background", [False, True])
def test_killed_at_every_call_to_the_system(background: bool, link_below: str, tmp_path: Path) -> None:
    """Some hundred of them write a checkpoint, each in its turn the last in test_saving_crashes.py. Here a process of
    its own trains on, and ends at its first one or between later checkpoints."""
    children = []
    for kill_at in (2, 210, 418):
        root = tmp_path / str(kill_at)
        root.mkdir()
        children.append((root, start(root, 4, kill_at, background, link_below)))
    newest = [ended(*child) for child in children]
    assert newest[0] == 0 and max(newest) >= 2


def ended(root: Path, process: Any) -> int:
    process.join(240)
    assert process.exitcode in (0, -signal.SIGKILL), process.exitcode
    return check_what_is_left(root)
