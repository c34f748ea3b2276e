"""What a save writes can be loaded and is kept, on file systems with limits too."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from superoffload import checkpoints
from superoffload.checkpoints import folder as folders
from superoffload.errors import ArgumentError, DiskError, StateError
from tests.support.adamw_training import batch, model_of


def fail_folders(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    """EACCES: on opening; others: on fsync."""
    call = "open" if error == errno.EACCES else "fsync"
    real = getattr(os, call)

    def failing(what: Any, flags: int = 0, *rest: Any, **named: Any) -> Any:
        if stat.S_ISDIR(os.stat(what).st_mode) and not flags & os.O_DIRECTORY:
            raise OSError(error, os.strerror(error))
        return real(what, *((flags, *rest) if call == "open" else ()), **named)

    monkeypatch.setattr(os, call, failing)


@pytest.mark.parametrize("error", ["EINVAL", "EBADF", "EACCES"])
def test_file_systems_that_cannot_sync_folders(
    error: str, tmp_path: Path, reader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_folders(monkeypatch, getattr(errno, error))
    for step in (1, 2):
        checkpoints.save(tmp_path / "new" / f"step-{step}", *reader, keep=1)
    checkpoints.export_weights(tmp_path / "also" / "weights", *reader)
    assert checkpoints.latest(tmp_path / "new") == tmp_path / "new" / "step-2"
    checkpoints.load(tmp_path / "new" / "step-2", *reader)


def test_a_disk_that_fails_to_sync_a_folder_is_an_error(
    tmp_path: Path, reader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_folders(monkeypatch, errno.EIO)
    with pytest.raises(DiskError, match="not saved"):
        checkpoints.save(tmp_path / "step-1", *reader)


def test_state_that_has_no_place_in_a_checkpoint_is_refused(tmp_path: Path) -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoints.save(tmp_path / "before", model, optimizer)  # there is none yet
    batch(model, 1).backward()
    optimizer.step()
    optimizer.state[next(model.parameters())]["average"] = torch.zeros(())
    with pytest.raises(ArgumentError, match=r"its state of 0\.weight has average, for which a checkpoint"):
        checkpoints.save(tmp_path / "step-1", model, optimizer)
    assert os.listdir(tmp_path) == ["before"]


def test_keep_says_when_it_removed_nothing(tmp_path: Path, reader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints.save(tmp_path / "step-1", *reader)
    with monkeypatch.context() as patch:
        finished = folders.finished
        patch.setattr(folders, "finished", lambda root: finished(root)[:1])
        with pytest.raises(StateError, match=r"step-2: not whole when it was read back .keep=1 does not find it"):
            checkpoints.save(tmp_path / "step-2", *reader, keep=1)

    def unreadable(path: Path) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", unreadable)
        with pytest.raises(DiskError, match=r"step-3 is saved, but keep=1 could not look for older ones \(Permission"):
            checkpoints.save(tmp_path / "step-3", *reader, keep=1)
        assert checkpoints.latest(tmp_path) is None
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-2", "step-3"]
