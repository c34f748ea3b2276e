"""``sleep(folder)`` writes masters and moments to a file without a name, and ``wake()`` reads them; test_sleep.py shows
that the bits are those of a run that never slept."""

from __future__ import annotations

import errno
import os
import shutil
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from superoffload import AdamW, checkpoints
from superoffload.errors import ArgumentError, HostMemoryError, LostState, StateError
from superoffload.host.memory import refused as memory_refused
from tests.support.adamw_training import model_of, train
from tests.support.sleepers import optimizer_of, steps

Usage = namedtuple("Usage", ("total", "used", "free"))


@pytest.fixture
def trained() -> Iterator[tuple[nn.Module, AdamW]]:
    model = model_of(torch.bfloat16)
    with optimizer_of(model, speculation="always", master_dtype="split", state_dtype="8bit") as optimizer:
        steps(model, optimizer, count=2)
        yield model, optimizer


@contextmanager
def a_failing_disk(call: str, code: int = errno.EIO) -> Iterator[None]:
    with mock.patch(f"superoffload.engine.state_file.os.{call}", side_effect=OSError(code, os.strerror(code))):
        yield


def test_the_disk_gets_its_room_back(tmp_path: Path, trained: tuple[nn.Module, AdamW]) -> None:
    """Also after writes and reads that move less than they were asked for."""
    _, optimizer = trained
    digests = optimizer.state_digests()
    write, read = os.pwrite, os.preadv
    with (
        mock.patch.object(os, "pwrite", lambda file, data, at: write(file, data[:1000], at)),
        mock.patch.object(os, "preadv", lambda file, into, at: read(file, [into[0][:700]], at)),
    ):
        for _ in range(2):
            optimizer.sleep(tmp_path)
            file = optimizer._engine.layout.stored
            assert file is not None
            optimizer.wake()
            assert file._file.closed
    assert optimizer.state_digests() == digests
    optimizer.sleep(tmp_path)
    file = optimizer._engine.layout.stored
    assert file is not None
    optimizer.close()
    assert file._file.closed


# ---- calls ----------------------------------------------------------------------------------------------------------


def test_calls_while_the_state_is_in_a_file(tmp_path: Path, trained: tuple[nn.Module, AdamW]) -> None:
    model, optimizer = trained
    weight = next(model.parameters())
    digests, state = optimizer.state_digests(), str(optimizer.state_dict())
    optimizer.sleep(tmp_path)
    optimizer.sleep(tmp_path)
    optimizer.sleep()
    reads: list[Callable[[], Any]] = [
        optimizer.state_digests,
        optimizer.state_dict,
        lambda: checkpoints.save(tmp_path / "none", model, optimizer),
        lambda: checkpoints.save_in_background(tmp_path / "none", model, optimizer),
        lambda: checkpoints.export_weights(tmp_path / "none", model, optimizer),
    ]
    for call in reads:
        with pytest.raises(StateError, match=rf"in a file in {tmp_path} since sleep\(folder\).*call wake\(\) first"):
            call()
    with pytest.raises(StateError, match=r"asleep since sleep\(\); call wake\(\) first"):
        optimizer.step()
    assert os.listdir(tmp_path) == []
    optimizer.synchronize()
    optimizer.zero_grad()
    assert list(optimizer.state[weight]) == ["step"]
    assert optimizer.stats()["steps"] == 2
    optimizer.wake()
    assert optimizer.state_digests() == digests
    assert str(optimizer.state_dict()) == state
    optimizer.sleep()
    assert str(optimizer.state_dict()) == state
    optimizer.sleep(tmp_path)  # from memory
    optimizer.close()
    with pytest.raises(StateError, match="of a closed optimizer they are gone"):
        optimizer.state_digests()
    with pytest.raises(StateError, match="closed"):
        optimizer.wake()


# ---- what goes wrong ------------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_take_the_state_changes_nothing(tmp_path: Path, trained: tuple[nn.Module, AdamW]) -> None:
    model, optimizer = trained
    (tmp_path / "file").touch()
    refused: tuple[tuple[Any, str], ...] = (
        (tmp_path / "none", "No such file or directory; expected a folder to write to"),
        (tmp_path / "file", "expected a folder to write to"),
        ("", r"folder='': expected the path of a folder on a disk, or None"),
        (3.5, r"folder=3.5: expected the path of a folder on a disk, or None"),
        ("a\0b", r"folder='a\\x00b': expected the path of a folder on a disk, or None"),
    )
    for folder, words in refused:
        with pytest.raises(ArgumentError, match=words):
            optimizer.sleep(folder)
    with (
        mock.patch.object(shutil, "disk_usage", return_value=Usage(10**9, 10**9 - 1000, 1000)),
        pytest.raises(ArgumentError, match=r"1e-06 GB are free there, and masters and moments have .* GB"),
    ):
        optimizer.sleep(tmp_path)
    assert os.listdir(tmp_path) == ["file"]
    model(torch.ones(2, 16, dtype=torch.bfloat16)).sum().backward()
    with pytest.raises(StateError, match=r"gradients of this step have arrived"):
        optimizer.sleep(tmp_path)
    optimizer.step()  # it is awake
    assert optimizer.stats()["steps"] == 3


def test_a_write_that_fails_leaves_it_asleep_in_memory(tmp_path: Path, trained: tuple[nn.Module, AdamW]) -> None:
    model, optimizer = trained
    digests = optimizer.state_digests()
    for call in ("pwrite", "fsync"):
        with (
            a_failing_disk(call, errno.ENOSPC),
            pytest.raises(StateError, match=r"could not be written .*No space left.* asleep, and they are still in"),
        ):
            optimizer.sleep(tmp_path)
        assert optimizer.state_digests() == digests
        with pytest.raises(StateError, match="asleep"):
            optimizer.step()
    optimizer.sleep(tmp_path)
    optimizer.wake()
    assert optimizer.state_digests() == digests
    train(model, optimizer, range(1))


def test_what_cannot_be_read_leaves_it_in_the_file(tmp_path: Path, trained: tuple[nn.Module, AdamW]) -> None:
    _, optimizer = trained
    digests = optimizer.state_digests()
    optimizer.sleep(tmp_path)
    with (
        a_failing_disk("preadv"),
        pytest.raises(
            StateError, match=r"wake\(\): masters and moments in .* cannot be read: Input/output.* still asl"
        ),
    ):
        optimizer.wake()
    with (
        mock.patch("superoffload.engine.placement.host_zeros", side_effect=memory_refused(1 << 30, "a test")),
        pytest.raises(HostMemoryError, match=r"wake\(\): .*were refused.* still asleep; to wake it free memory"),
    ):
        optimizer.wake()
    with pytest.raises(StateError, match="in a file"):
        optimizer.state_digests()
    optimizer.wake()
    assert optimizer.state_digests() == digests


def test_a_system_that_starts_no_threads_changes_nothing(tmp_path: Path, trained: tuple[nn.Module, AdamW]) -> None:
    model, optimizer = trained
    digests = optimizer.state_digests()
    refused = mock.patch("threading.Thread.start", side_effect=RuntimeError("can't start new thread"))
    with refused, pytest.raises(StateError, match=r"could not be written to .*\(can't start new thread\)"):
        optimizer.sleep(tmp_path)
    optimizer.sleep(tmp_path)
    with refused, pytest.raises(StateError, match=r"cannot be read: can't start new thread.* call wake"):
        optimizer.wake()
    optimizer.wake()
    assert optimizer.state_digests() == digests
    train(model, optimizer, range(1))


def test_other_bytes_than_were_written_are_found(tmp_path: Path, trained: tuple[nn.Module, AdamW]) -> None:
    _, optimizer = trained
    digests = optimizer.state_digests()
    optimizer.sleep(tmp_path)
    file = optimizer._engine.layout.stored
    assert file is not None
    handle = file._file.fileno()
    size = os.fstat(handle).st_size
    for at in (0, size // 2, size - 1):
        (byte,) = os.pread(handle, 1, at)
        os.pwrite(handle, bytes([byte ^ 4]), at)
        with pytest.raises(LostState, match=r"are not what sleep\(\) wrote there: .* load the last checkpoint$"):
            optimizer.wake()
        os.pwrite(handle, bytes([byte]), at)
    os.truncate(handle, size - 1)
    with pytest.raises(StateError, match="cannot be read: the file ends too early"):
        optimizer.wake()
    os.pwrite(handle, bytes([byte]), size - 1)
    optimizer.wake()
    assert optimizer.state_digests() == digests
