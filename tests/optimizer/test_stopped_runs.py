"""Runs that are told to stop, by storms of signals, by a scheduler that waits a little, or by the kernel; and clocks
that jump. What was saved goes on to the same bits."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from superoffload import AdamW, checkpoints
from tests.convergence.local_ranks import PRELOAD
from tests.support.adamw_training import model_of, pair, train

GRACE = 30  # seconds between a scheduler's SIGTERM and its SIGKILL


def train_until_told(root: str, steps: int, raises: bool) -> None:
    """In a child: goes on from the last checkpoint; at SIGTERM it saves the last finished step and ends."""
    torch.set_num_threads(1)
    told: list[int] = []

    def terminated(number: int, frame: object) -> None:
        told.append(number)
        if raises and len(told) == 1:
            raise SystemExit

    signal.signal(signal.SIGTERM, terminated)
    model = model_of()
    optimizer = AdamW(model.parameters(), threads=1, max_grad_norm=1.0, bucket_numel=512, speculation="always")
    last = checkpoints.latest(root)
    done = checkpoints.load(last, model, optimizer)["steps"] if last is not None else 0
    before = optimizer.stats()["steps"]
    try:
        while done + optimizer.stats()["steps"] - before < steps and not told:
            train(model, optimizer, [int(done + optimizer.stats()["steps"] - before)])
            Path(root, "progress").write_text(str(optimizer.stats()["steps"]))
    except SystemExit:
        pass  # in backward or in step(): the step was given up, or is whole
    done += int(optimizer.stats()["steps"] - before)
    checkpoints.save(f"{root}/step-{done}-{len(os.listdir(root))}", model, optimizer, extra={"steps": done})
    Path(root, "digests").write_text(json.dumps([done, optimizer.state_digests()]))
    optimizer.close()
    os._exit(0)


@pytest.mark.parametrize("raises", [False, True])
def test_told_to_end_it_saves_within_the_grace_and_goes_on_to_the_same_bits(tmp_path: Path, raises: bool) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    steps, progress = 30, tmp_path / "progress"
    for calls in range(1, 4):
        progress.unlink(missing_ok=True)
        told = calls < 3
        child = context.Process(target=train_until_told, args=(str(tmp_path), steps, raises), daemon=True)
        child.start()
        until = time.monotonic() + 60
        while told and time.monotonic() < until and not (progress.exists() and int(progress.read_text() or 0) >= 3):
            time.sleep(0.001)
        for _ in range(3 if told else 0):  # launchers and schedulers both do
            os.kill(child.pid or 0, signal.SIGTERM)
            time.sleep(0.001)
        child.join(GRACE if told else 120)
        assert child.exitcode == 0, "the scheduler would have killed it"
    done, found = json.loads((tmp_path / "digests").read_text())
    assert done == steps
    model = model_of()
    with AdamW(model.parameters(), threads=1, max_grad_norm=1.0, speculation="never") as straight:
        train(model, straight, range(steps))
        assert straight.state_digests() == found


def test_a_clock_that_jumps_changes_nothing(tmp_path: Path) -> None:
    jumps = itertools.cycle([0.0, 4e9, -4e9, 1e18, 5.0])
    with (
        mock.patch("time.time", lambda: next(jumps)),
        mock.patch("time.time_ns", lambda: int(next(jumps))),
        pair(bucket_numel=512, max_grad_norm=1.0, trace=tmp_path / "trace.json") as (model, optimizer, twin, plain),
    ):
        for step in range(4):
            train(model, optimizer, [step])
            train(twin, plain, [step])
            checkpoints.save_in_background(tmp_path / f"step-{step}", model, optimizer, keep=2).wait(60)
        assert optimizer.state_digests() == plain.state_digests()
        assert checkpoints.latest(tmp_path) == tmp_path / "step-3"
        stats = optimizer.stats()
        assert 0 <= stats["optimizer_seconds_exposed"] < 60
        assert 0 <= stats["optimizer_seconds"] < 60
