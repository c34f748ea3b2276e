"""Ranks that wait for each other while they save: as long as the others go on, and what one is told is true."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from superoffload import checkpoints
from superoffload.checkpoints import saving
from superoffload.checkpoints.tensor_files import TensorFile
from tests.support.rank_processes import on_ranks, optimizer_of
from tests.support.saved_ranks import build, step


@contextlib.contextmanager
def on_rank(rank: int, name: str, harm: Any) -> Iterator[None]:
    with mock.patch(f"superoffload.checkpoints.{name}", harm) if dist.get_rank() == rank else contextlib.nullcontext():
        yield
    dist.barrier()


def failing(number: int) -> Any:
    return mock.Mock(side_effect=OSError(number, os.strerror(number)))


def error_of(function: Callable[[], Any]) -> str:
    """Empty for none."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def late(seconds: float, function: Any) -> Any:
    def run(*arguments: Any) -> Any:
        time.sleep(seconds)
        return function(*arguments)

    return run


def waits(folder: str) -> dict[str, str]:
    """What each save told this rank; empty for none."""
    model, options = build("fsdp2")
    told = {}
    with optimizer_of(model, **options) as optimizer:
        for name, rank, what, harm, timeout in (
            ("not-confirmed", 1, "folder.sync_folder", failing(errno.EIO), 60.0),
            ("not-read", 1, "folder.read_manifest", mock.Mock(side_effect=AssertionError("the whole one")), 60.0),
            ("not-listed", 1, "saving.os.listdir", failing(errno.EACCES), 60.0),
            # The first rank writes for longer than the time-out: file by file, then nothing at all.
            ("slow", 0, "tensor_files.TensorFile.write", late(0.02, TensorFile.write), 0.5),
            ("silent", 0, "saving.Job.complete", late(1.2, saving.Job.complete), 0.5),
        ):
            with on_rank(rank, what, harm):
                told[name] = error_of(partial(checkpoints.save, f"{folder}/{name}", model, optimizer, timeout=timeout))
        for name in os.listdir(folder):
            checkpoints.load(f"{folder}/{name}", model, optimizer)
    return told


def test_the_others_wait_while_the_first_rank_goes_on(tmp_path: Path) -> None:
    first, second = on_ranks(2, waits, str(tmp_path))
    assert first == dict.fromkeys(first, "")
    confirmed, silent = second.pop("not-confirmed"), second.pop("silent")
    assert "not-confirmed: written, but the disk did not confirm" in confirmed and "untouched" not in confirmed
    assert "RankError" in silent and "no sign of life of the first rank within 0.5 s" in silent
    assert second == dict.fromkeys(second, "")
    assert len(os.listdir(tmp_path)) == 5
    assert not list(tmp_path.rglob(".*"))  # a finished checkpoint holds no mark of a failure


def first_gives_up(folder: str) -> str:
    """The second rank has not begun to write when the first one has no room."""
    model, options = build("fsdp2")
    with (
        optimizer_of(model, **options) as optimizer,
        on_rank(1, "saving.Job.write_part", late(1.0, saving.Job.write_part)),
        on_rank(0, "tensor_files.os.pwrite", failing(errno.ENOSPC)),
    ):
        return error_of(lambda: checkpoints.save(f"{folder}/step-1", model, optimizer, timeout=60.0))


def test_a_rank_that_writes_when_the_first_one_gives_up_is_told_so(tmp_path: Path) -> None:
    first, second = on_ranks(2, first_gives_up, str(tmp_path))
    assert first.startswith("DiskError") and "No space left on device" in first
    assert second.startswith(f"RankError: save(): {tmp_path}/step-1: the first rank gave up, or this rank does not ")
    assert not os.listdir(tmp_path)


def in_a_row(folder: str) -> list[str]:
    """The second rank looks for each name long after the first one gave it."""
    model, options = build("fsdp2")
    with optimizer_of(model, **options) as optimizer:
        started = []
        with on_rank(1, "saving.Job.wait_until_named", late(0.4, saving.Job.wait_until_named)):
            for seed in range(3):
                step(model, optimizer, seed)
                path = f"{folder}/step-{seed}"
                started.append(checkpoints.save_in_background(path, model, optimizer, keep=1, timeout=30.0))
            return [error_of(partial(one.wait, 60)) for one in started]


def test_keep_does_not_remove_what_another_rank_has_not_yet_seen(tmp_path: Path) -> None:
    assert on_ranks(2, in_a_row, str(tmp_path)) == [[""] * 3] * 2
    assert os.listdir(tmp_path) == ["step-2"]
