"""Ranks that wait for each other while they save: as long as the others go on, and what one is told is true."""

from __future__ import annotations

import contextlib
import errno
import os
import re
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


# Under each name: (rank, what, by what it is replaced) once or twice, the time-out of each rank, and words of what each
# is told; empty for nothing.
WAITS: dict[str, tuple[list[tuple[int, str, Any]], tuple[float, float], tuple[str, str]]] = {
    "not-confirmed": ([(1, "folder.sync_folder", failing(errno.EIO))], (60, 60),
                      ("", "not-confirmed: written, but the disk did not confirm")),
    "not-read": ([(1, "folder.read_manifest", mock.Mock(side_effect=AssertionError))], (60, 60), ("", "")),
    "not-listed": ([(1, "saving.os.listdir", failing(errno.EACCES))], (60, 60), ("", "")),
    # The first rank writes for longer than the time-out: file by file, then nothing at all.
    "slow": ([(0, "tensor_files.TensorFile.write", late(0.02, TensorFile.write))], (0.5, 0.5), ("", "")),
    "silent": ([(0, "saving.Job.complete", late(1.2, saving.Job.complete))], (0.5, 0.5),
               ("", "RankError: .*no sign of life of the first rank within 0.5 s")),
    # The second rank never writes its part; then it has no room for it, which takes no time-out to be known.
    "lost": ([(1, "saving.Job.hand_in", mock.Mock())], (1, 3),
             ("RankError: .*rank 1 has not written its part", "RankError")),
    "no-room": ([(1, "tensor_files.os.pwrite", failing(errno.ENOSPC))], (600, 600),
                ("RankError: .*rank 1 could not write its part", "DiskError: .*/no-room: not saved .No space left on")),
    # The second rank has not begun to write when the first one has no room.
    "given-up": ([(1, "saving.Job.write_part", late(1.0, saving.Job.write_part)),
                  (0, "tensor_files.os.pwrite", failing(errno.ENOSPC))], (60, 60),
                 ("DiskError: .*No space left on device",
                  "RankError: .*/given-up: the first rank gave up, or this rank does not ")),
}  # fmt: skip


def waits(folder: str) -> dict[str, str]:
    """What each save told this rank; empty for none."""
    model, options = build("fsdp2")
    told, rank = {}, dist.get_rank()
    with optimizer_of(model, **options) as optimizer:
        for name, (harms, timeouts, _) in WAITS.items():
            with contextlib.ExitStack() as stack:
                for harm in harms:
                    stack.enter_context(on_rank(*harm))
                save = partial(checkpoints.save, f"{folder}/{name}", model, optimizer, timeout=timeouts[rank])
                told[name] = error_of(save)
        for name in os.listdir(folder):
            checkpoints.load(f"{folder}/{name}", model, optimizer)
    return told


def test_ranks_wait_while_the_others_go_on_and_each_is_told_the_truth(tmp_path: Path) -> None:
    told = on_ranks(2, waits, str(tmp_path))
    for name, (*_, words) in WAITS.items():
        for rank in range(2):
            assert re.match(f".*{words[rank]}" if words[rank] else "$", told[rank][name]), (
                name,
                rank,
                told[rank][name],
            )
    assert "untouched" not in told[1]["not-confirmed"]
    assert sorted(os.listdir(tmp_path)) == sorted(name for name, (*_, (first, _)) in WAITS.items() if not first)
    assert not list(tmp_path.rglob(".*"))  # a finished checkpoint holds no mark of a failure


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
