"""Processes that save side by side: what one of them saved is whole, whatever the others do or have left behind."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from superoffload import AdamW, checkpoints
from superoffload.checkpoints import folder as folders
from superoffload.checkpoints import saving
from superoffload.checkpoints.folder import finished
from superoffload.checkpoints.tensor_files import TensorFile
from superoffload.errors import ArgumentError, DiskError, StateError
from tests.convergence.local_ranks import PRELOAD
from tests.support.adamw_training import model_of, train

SAVES = 3
Saved = list[tuple[str, dict[str, str]]]  # names that a process was told are saved, and what is in them


def save_often(folder: str, names: str, keep: int | None, background: bool, go: Any) -> None:
    """In a child: saves and writes down what it was told of each. No error may come but those of a taken name."""
    torch.set_num_threads(1)
    said, model = [], model_of()
    with AdamW(model.parameters(), threads=1) as optimizer:
        go.wait(60)
        for step in range(1, SAVES + 1):
            train(model, optimizer, range(step + os.getpid(), step + os.getpid() + 1))
            digests, name = optimizer.state_digests(), names.format(step)
            try:
                if background:
                    checkpoints.save_in_background(f"{folder}/{name}", model, optimizer, keep=keep).wait(60)
                else:
                    checkpoints.save(f"{folder}/{name}", model, optimizer, keep=keep)
                said.append((name, digests))
            except ArgumentError as error:
                assert "exists already; save under another name" in str(error), error
            except StateError as error:  # another process has saved and kept a newer one meanwhile, or begun this one
                assert ("not whole when it was read back" if keep else "under this name began") in str(error), error
    Path(folder, f"{os.getpid()}.json").write_text(json.dumps(said))
    os._exit(0)


def together(jobs: list[tuple[Path, str]], keep: int | None, background: bool = False) -> dict[Path, list[Saved]]:
    """What the processes of each folder were told."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    go, started = context.Barrier(len(jobs)), []
    for folder, names in jobs:
        folder.mkdir(parents=True, exist_ok=True)
        started.append(context.Process(target=save_often, args=(str(folder), names, keep, background, go), daemon=True))
        started[-1].start()
    for process in started:
        process.join(300)
    assert [process.exitcode for process in started] == [0] * len(jobs)
    return {folder: [json.loads(path.read_text()) for path in folder.glob("*.json")] for folder, _ in jobs}


def assert_whole(folder: Path, saved: Saved, reader: Any) -> None:
    for name, digests in saved:
        checkpoints.load(folder / name, *reader)
        assert reader[1].state_digests() == digests, name


@pytest.mark.parametrize(
    ("processes", "parents", "keep", "background"), [(2, 1, 1, True), (4, 1, None, False), (8, 2, 1, False)]
)
def test_every_save_that_returned_is_whole(
    processes: int, parents: int, keep: int | None, background: bool, tmp_path: Path, reader: Any
) -> None:
    jobs = [(tmp_path / f"runs-{i % parents}", f"job{i}-{{}}") for i in range(processes)]
    for folder, saved in together(jobs, keep, background).items():
        assert [len(one) for one in saved] == [SAVES] * (processes // parents)
        for one in saved:
            assert_whole(folder, one[-1:] if keep else one, reader)
        assert len(list(finished(folder))) == len(saved) * (keep or SAVES)
        assert not list(folder.glob(".*"))


def test_of_saves_under_one_name_one_wins(tmp_path: Path, reader: Any) -> None:
    saved = [entry for one in together([(tmp_path, "step-{}")] * 4, None)[tmp_path] for entry in one]
    assert sorted(name for name, _ in saved) == [f"step-{step}" for step in range(1, SAVES + 1)]
    assert_whole(tmp_path, saved, reader)
    assert checkpoints.latest(tmp_path) == tmp_path / f"step-{SAVES}" and not list(tmp_path.glob(".*"))


def test_exports_into_one_folder_do_not_take_each_others_files(
    tmp_path: Path, reader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one begins while the first one writes; the one that ends last has written what is there."""
    write, other = TensorFile.write, model_of(seed=3)

    def second(*arguments: Any) -> None:
        monkeypatch.setattr(TensorFile, "write", write)
        checkpoints.export_weights(tmp_path, other)
        write(*arguments)

    monkeypatch.setattr(TensorFile, "write", second)
    path = checkpoints.export_weights(tmp_path, *reader)
    assert os.listdir(tmp_path) == [path.name]
    found = load_file(path)
    assert all(torch.equal(found[name], value) for name, value in reader[0].state_dict().items())


# ---- what keep removes, and names that cannot be ------------------------------------------------------------------


def test_links_and_other_series_are_left_alone(tmp_path: Path, reader: Any) -> None:
    outside, root = tmp_path / "outside", tmp_path / "runs"
    checkpoints.save(outside / "step-0", *reader)
    for name in ("step-1", "step-2", "other-1", "final", "run2-step-1"):
        checkpoints.save(root / name, *reader)
    links: dict[str, Any] = {"latest": "step-2", "step-0": outside / "step-0", "step-3": "nowhere", "best": "step-1"}
    for name, target in links.items():
        (root / name).symlink_to(target)
    checkpoints.save(root / "step-10", *reader)
    checkpoints.save(root / "step-4", *reader, keep=3)  # as after going back: never newer ones
    rest = {*links, "other-1", "final", "run2-step-1"}
    assert set(os.listdir(root)) == rest | {"step-2", "step-4", "step-10"}
    checkpoints.save(root / "step-11", *reader, keep=1)
    assert set(os.listdir(root)) == rest | {"step-11"}
    assert os.readlink(root / "latest") == "step-2" and (outside / "step-0" / "manifest.json").exists()


def test_what_keep_cannot_remove_is_named(tmp_path: Path, reader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints.save(tmp_path / "step-1", *reader)
    rename = os.rename

    def busy(source: Any, target: Any) -> None:
        if Path(source).name == "step-1":
            raise OSError(errno.EBUSY, "Device or resource busy")
        rename(source, target)

    monkeypatch.setattr(os, "rename", busy)
    with pytest.raises(DiskError, match=r"step-2 is saved, but keep=1 could not remove .*step-1 \(Device or resource"):
        checkpoints.save(tmp_path / "step-2", *reader, keep=1)
    assert checkpoints.latest(tmp_path) == tmp_path / "step-2"


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_written(tmp_path: Path, reader: Any) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    before = sorted(os.listdir(tmp_path))
    for name, words in {
        "new/" + "x" * 300: "cannot be made (File name too long: ",
        "/".join(["x" * 200] * 30): "cannot be made (File name too long: ",
        "nul\0": "it contains a NUL character",
        "\ud800": "name one that can be made",
        "link": "exists already; save under another name",
        "link/new": "cannot be made (File exists: ",
        "file/new": "cannot be made (",
        "": "exists already",
    }.items():
        for call in (checkpoints.save, checkpoints.save_in_background):
            with pytest.raises(ArgumentError) as caught:
                call(str(tmp_path) + "/" + name, *reader)
            assert words in str(caught.value) and str(caught.value).startswith("folder="), (name, caught.value)
    for wrong in (None, b"bytes"):
        with pytest.raises(ArgumentError, match=r"folder=.*: no path of a folder \("):
            checkpoints.save(wrong, *reader)  # type: ignore[arg-type]
    assert sorted(os.listdir(tmp_path)) == before
    checkpoints.save(tmp_path / ("y" * 255), *reader)  # what the file system takes, we take
    assert checkpoints.latest(tmp_path) == tmp_path / ("y" * 255)


# ---- what killed saves left behind -------------------------------------------------------------------------------

MARK = "0123456789ab"


def left(root: Path, name: str) -> Path:
    (root / name).mkdir()
    (root / name / "rank-00000.safetensors").write_bytes(b"half of it")
    return root / name


def test_what_is_removed_and_what_stays(tmp_path: Path, reader: Any) -> None:
    same, earlier, removing = (
        left(tmp_path, f".{name}-{MARK}") for name in ("writing-step-10", "writing-step-2", "removing-step-3")
    )
    others = [f".writing-{name}-{MARK}" for name in ("step-11", "step-13", "best-1")]
    stays = [left(tmp_path, name) for name in (*others, ".writing-notes", ".removing-old", ".x")]
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
