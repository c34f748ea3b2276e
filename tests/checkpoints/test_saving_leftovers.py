"""What killed saves left behind: a later save of the same name removes it, and ``keep`` what is of its series."""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from superoffload import checkpoints
from superoffload.checkpoints import folder as folders
from superoffload.checkpoints import saving
from superoffload.errors import StateError

MARK = "0123456789ab"


def left(root: Path, name: str) -> Path:
    (root / name).mkdir()
    (root / name / "rank-00000.safetensors").write_bytes(b"half of it")
    return root / name


def test_what_is_removed_and_what_stays(tmp_path: Path, reader: Any) -> None:
    same, earlier, removing = (
        left(tmp_path, f".{name}-{MARK}") for name in ("writing-step-10", "writing-step-2", "removing-step-3")
    )
    stays = [
        left(tmp_path, name)
        for name in (
            f".writing-step-11-{MARK}", f".writing-step-13-{MARK}", f".writing-best-1-{MARK}", ".writing-notes",
            ".removing-old", ".x",
        )
    ]  # fmt: skip
    assert checkpoints.latest(tmp_path) is None
    checkpoints.save(tmp_path / "step-10", *reader)
    assert not same.exists() and earlier.exists() and removing.exists()
    checkpoints.save(tmp_path / "step-11-a", *reader, keep=1)  # another series
    assert earlier.exists() and all((path / "rank-00000.safetensors").exists() for path in stays)
    (tmp_path / f".writing-step-12-{MARK}").symlink_to(stays[-1])
    checkpoints.save(tmp_path / "step-12", *reader, keep=2)
    assert not (earlier.exists() or removing.exists() or stays[0].exists())
    assert all((path / "rank-00000.safetensors").exists() for path in stays[1:])
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-10", "step-11-a", "step-12"]


@pytest.mark.parametrize(("owner", "name"), [(folders, "write_durably"), (saving.Job, "complete")])
def test_of_two_saves_under_one_name_the_first_is_told(owner: Any, name: str, tmp_path: Path, reader: Any) -> None:
    """The second one begins while the first one writes, or has written its part, in a process of another start of the
    same job."""
    go_on = getattr(owner, name)

    def second(*arguments: Any) -> None:
        with mock.patch.object(owner, name, go_on):
            checkpoints.save(tmp_path / "step-1", *reader)
        go_on(*arguments)

    with mock.patch.object(owner, name, second), pytest.raises(StateError) as caught:
        checkpoints.save(tmp_path / "step-1", *reader, timeout=5.0)
    assert f"{tmp_path / 'step-1'}: not saved, another save under this name began" in str(caught.value)
    assert os.listdir(tmp_path) == ["step-1"]
    checkpoints.load(tmp_path / "step-1", *reader)


def test_a_newer_checkpoint_of_another_run_is_named(tmp_path: Path, reader: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("step-60", "step-100", "best-1"):
            checkpoints.save(tmp_path / name, *reader)
    with pytest.warns(RuntimeWarning, match=r"step-100 has a higher number than .* now, so latest\(\) names"):
        checkpoints.save(tmp_path / "step-70", *reader)
    assert checkpoints.latest(tmp_path) == tmp_path / "step-100"


def test_a_folder_that_is_given_up_goes_at_once(tmp_path: Path) -> None:
    """Also where it may not be renamed, or a file of another rank comes while it is emptied, which would keep it there
    and the other ranks waiting for it."""
    remove, folder = os.rmdir, tmp_path

    def late(path: Any, **options: Any) -> None:
        with suppress(FileNotFoundError):
            (folder / "rank-00001.safetensors").write_bytes(b"half of it")
        remove(path, **options)

    for harm in (("os.rmdir", late), ("os.rename", mock.Mock(side_effect=PermissionError(1, "not permitted")))):
        folder = folders.begin(tmp_path / "step-1")
        with mock.patch(*harm):
            folders.give_up(folder)
        assert os.listdir(tmp_path) == []
