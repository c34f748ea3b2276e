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
from superoffload.host.memory import give_free_memory_back
from superoffload.host.memory import refused as memory_refused
from tests.support.adamw_training import model_of, train
from tests.support.sleepers import optimizer_of, resident_bytes, steps

Usage = namedtuple("Usage", ("total", "used", "free"))


@pytest.fixture(params=["whole", "split"])
def trained(request: pytest.FixtureRequest) -> Iterator[tuple[nn.Module, AdamW]]:
    options = {"master_dtype": "split", "state_dtype": "8bit"} if request.param == "split" else {}
    model = model_of(torch.bfloat16)
    with optimizer_of(model, speculation="always", **options) as optimizer:
        steps(model, optimizer, count=2)
        yield model, optimizer


def goes_on(model: nn.Module, optimizer: AdamW) -> Any:
    steps(model, optimizer, count=2)
    return optimizer.state_digests()


@contextmanager
def a_failing_disk(call: str, code: int = errno.EIO) -> Iterator[None]:
    with mock.patch(f"superoffload.engine.state_file.os.{call}", side_effect=OSError(code, os.strerror(code))):
        yield


# ---- memory and disk ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "per_param"), [({}, 12), ({"master_dtype": "split", "state_dtype": "bf16"}, 8)])
def test_the_memory_of_the_state_goes_back_each_time(tmp_path: Path, options: dict[str, Any], per_param: int) -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(1 << 22, dtype=torch.bfloat16)) for _ in range(4)])
    numel = 1 << 24
    with AdamW(model.parameters(), threads=2, speculation="never", **options) as optimizer:
        for round in range(4):
            optimizer.zero_grad()
            torch.stack([param.float().square().sum() for param in model]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.sleep()
            give_free_memory_back()
            in_memory, counted = resident_bytes(), optimizer.stats()["host_bytes"]
            optimizer.sleep(tmp_path)
            given_back = in_memory - resident_bytes()
            assert given_back > (per_param - 0.5) * numel, (round, given_back / numel)
            assert counted - optimizer.stats()["host_bytes"] == per_param * numel
            assert os.listdir(tmp_path) == [], "the file has no name, so that nothing is left if the process dies"
            optimizer.wake()


def test_the_disk_gets_its_room_back(tmp_path: Path, trained: tuple[nn.Module, AdamW]) -> None:
    before = set(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else set()
    _, optimizer = trained
    for _ in range(3):
        optimizer.sleep(tmp_path)
        optimizer.wake()
    optimizer.sleep(tmp_path)
    file = optimizer._engine.layout.stored
    assert file is not None
    optimizer.close()
    assert file._file.closed
    after = set(os.listdir("/proc/self/fd")) if before else set()
    assert len(after) <= len(before)


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


def test_a_parameter_that_begins_to_train_meanwhile(tmp_path: Path) -> None:
    found = []
    for sleeps in (False, True):
        model = model_of(torch.bfloat16)
        first, *_ = model.parameters()
        first.requires_grad_(False)
        with optimizer_of(model, speculation="always") as optimizer:
            steps(model, optimizer, count=2)
            if sleeps:
                optimizer.sleep(tmp_path)
            first.requires_grad_(True)
            if sleeps:
                optimizer.wake()
            found.append(goes_on(model, optimizer))
    assert found[0] == found[1]


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
    goes_on(model, optimizer)


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


def test_short_writes_and_reads_are_completed(tmp_path: Path, trained: tuple[nn.Module, AdamW]) -> None:
    _, optimizer = trained
    digests = optimizer.state_digests()
    write, read = os.pwrite, os.preadv
    with (
        mock.patch.object(os, "pwrite", lambda file, data, at: write(file, data[:1000], at)),
        mock.patch.object(os, "preadv", lambda file, into, at: read(file, [into[0][:700]], at)),
    ):
        optimizer.sleep(tmp_path)
        optimizer.wake()
    assert optimizer.state_digests() == digests
