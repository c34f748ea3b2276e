"""An optimizer that sleeps gives its memory back, and wakes with the bits of one that never slept.

In a folder, masters and moments are in a file without a name."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from superoffload import AdamW, checkpoints
from superoffload.errors import ArgumentError, HostMemoryError, LostState, StateError
from superoffload.host.memory import give_free_memory_back, refused
from tests.support.adamw_training import batch, model_of, train


def optimizer_of(model: nn.Module, **options: Any) -> AdamW:
    """Two groups, and buckets that cut parameters."""
    params = list(model.parameters())
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 1e-2}]
    return AdamW(groups, **{"threads": 2, "bucket_numel": 1024, "speculation": "always", **options})


def steps(model: nn.Module, optimizer: AdamW, count: int) -> None:
    for seed in range(count):
        optimizer.zero_grad()
        with optimizer.accumulate():
            batch(model, 100 + seed).backward()
        batch(model, seed).backward()
        optimizer.step()


@pytest.fixture
def trained() -> Iterator[tuple[nn.Module, AdamW]]:
    model = model_of(torch.bfloat16)
    with optimizer_of(model, master_dtype="split", state_dtype="8bit") as optimizer:
        steps(model, optimizer, count=2)
        yield model, optimizer


@contextmanager
def asleep(optimizer: AdamW, folder: Path | None, sleeps: bool) -> Iterator[None]:
    if sleeps:
        optimizer.sleep(folder)
    yield
    if sleeps:
        optimizer.wake()


def a_gradient_arrives(model: nn.Module, optimizer: AdamW, folder: Path | None, sleeps: bool) -> None:
    optimizer.zero_grad()
    with asleep(optimizer, folder, sleeps):
        before = optimizer.stats()["host_bytes"]
        batch(model, 9).backward()
        assert not sleeps or optimizer.stats()["host_bytes"] == before
    optimizer.step()


def a_parameter_is_written(model: nn.Module, optimizer: AdamW, folder: Path | None, sleeps: bool) -> None:
    weight, other, *_ = model.parameters()
    with asleep(optimizer, folder, sleeps), torch.no_grad():
        weight[1] = 0.25
        other.data[1] = 0.25
    assert not sleeps or all(optimizer.state[param]["master"][1].eq(0.25).all() for param in (weight, other))


def parameters_move_away(model: nn.Module, optimizer: AdamW, folder: Path | None, sleeps: bool) -> None:
    """Masters keep the bits that bf16 parameters lack."""
    with asleep(optimizer, folder, sleeps):
        kept = [param.data.clone() for param in model.parameters()]
        for param in model.parameters():
            param.data = torch.empty(0, dtype=param.dtype)
        if sleeps:
            with pytest.raises(StateError, match=r"its memory was freed.*to wake it give the parameter back"):
                optimizer.wake()
        for param, values in zip(model.parameters(), kept, strict=True):
            param.data = values


@pytest.mark.filterwarnings("ignore:superoffload. .* changed without autograd's version counters")
@pytest.mark.parametrize(
    ("meanwhile", "master_dtype", "on_disk"),
    [
        (a_gradient_arrives, "fp32", True),
        (a_gradient_arrives, "split", False),
        (a_parameter_is_written, "split", True),
        (a_parameter_is_written, "fp32", False),
        (parameters_move_away, "fp32", False),
        (parameters_move_away, "split", True),
    ],
)
def test_it_goes_on_as_if_it_had_been_awake(
    meanwhile: Callable[[nn.Module, AdamW, Path | None, bool], None], master_dtype: str, on_disk: bool, tmp_path: Path
) -> None:
    found = []
    for sleeps in (False, True):
        model = model_of(torch.bfloat16)
        with optimizer_of(model, master_dtype=master_dtype) as optimizer:
            steps(model, optimizer, count=3)
            meanwhile(model, optimizer, tmp_path if on_disk else None, sleeps)
            steps(model, optimizer, count=2)
            found.append(optimizer.state_digests())
    assert found[0] == found[1]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_the_system_gets_the_memory_back_each_time(tmp_path: Path) -> None:
    options: dict[str, Any] = {"master_dtype": "split", "state_dtype": "bf16"}
    model = nn.ParameterList([nn.Parameter(torch.ones(1 << 21, dtype=torch.bfloat16)) for _ in range(4)])
    numel = 1 << 23
    with AdamW(model.parameters(), threads=2, speculation="always", **options) as optimizer:
        asleep: list[int] = []
        of_buckets, of_state = [], []  # bytes given back in each round
        for _ in range(5):
            for param in model:
                param.grad = torch.full_like(param, 0.5)
            optimizer.step()
            optimizer.zero_grad()
            give_free_memory_back()  # what the gradients were in
            awake = resident_bytes()
            optimizer.sleep()
            asleep.append(resident_bytes())
            of_buckets.append(awake - asleep[-1])
            counted = optimizer.stats()["host_bytes"]
            assert optimizer.stats()["journal_reserved_bytes"] == 0
            optimizer.sleep(tmp_path)
            of_state.append(asleep[-1] - resident_bytes())
            assert counted - optimizer.stats()["host_bytes"] == 8 * numel
            assert not any(tmp_path.iterdir()), "the file has no name, so that nothing is left if the process dies"
            optimizer.wake()
    # The system moves pages of its own accord (khugepaged fills huge pages), so a single round may be off.
    assert median(of_buckets) > 2 * numel, of_buckets  # packed gradients, shadows and journals, at least
    assert median(of_state) > 7.5 * numel, of_state
    assert min(asleep[-2:]) - asleep[1] < numel  # a leak of a byte per parameter would show


def test_the_disk_gets_its_room_back(tmp_path: Path, trained: tuple[nn.Module, AdamW]) -> None:
    """Also after writes and reads that move less than they were asked for."""
    _, optimizer = trained
    digests = optimizer.state_digests()
    write, read = os.pwrite, os.preadv
    with (
        mock.patch.object(os, "pwrite", lambda file, data, at: write(file, data[:1000], at)),
        mock.patch.object(os, "preadv", lambda file, into, at: read(file, [into[0][:700]], at)),
    ):
        optimizer.sleep(tmp_path)
        file = optimizer._engine.layout.stored
        optimizer.wake()
    assert file is not None and file._file.closed
    assert optimizer.state_digests() == digests
    optimizer.sleep(tmp_path)
    file = optimizer._engine.layout.stored
    optimizer.close()
    assert file is not None and file._file.closed


@pytest.mark.parametrize("on_disk", [False, True])
def test_calls_while_asleep(on_disk: bool, tmp_path: Path, trained: tuple[nn.Module, AdamW]) -> None:
    model, optimizer = trained
    digests, state = optimizer.state_digests(), optimizer.state_dict()
    checkpoints.save(tmp_path / "awake", model, optimizer)
    folder = tmp_path / "folder"
    folder.mkdir()
    optimizer.sleep(folder if on_disk else None)
    optimizer.sleep(folder if on_disk else None)
    writes: list[Callable[[], Any]] = [
        optimizer.step,
        optimizer.refresh_masters,
        lambda: optimizer.load_state_dict(state),
        lambda: optimizer.load_masters([]),
        lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]}),
        lambda: checkpoints.load(tmp_path / "awake", model, optimizer),
    ]
    for call in writes:
        with pytest.raises(StateError, match=r"asleep since sleep\(\); call wake\(\) first"):
            call()
    reads: list[Callable[[], Any]] = [
        optimizer.state_digests,
        optimizer.state_dict,
        lambda: checkpoints.save(tmp_path / "a", model, optimizer),
        lambda: checkpoints.save_in_background(tmp_path / "b", model, optimizer).wait(60),
        lambda: checkpoints.export_weights(tmp_path / "c", model, optimizer),
    ]
    for call in reads:
        if not on_disk:
            call()
            continue
        with pytest.raises(StateError, match=rf"in a file in {folder} since sleep\(folder\).*call wake\(\) first"):
            call()
    weight = next(model.parameters())
    if on_disk:
        assert list(optimizer.state[weight]) == ["step"] and os.listdir(folder) == []
        with pytest.raises(StateError, match=r"call wake\(\) first"):
            optimizer.state[weight]["exp_avg"] = torch.zeros(48, 16)
    optimizer.synchronize()
    optimizer.zero_grad()
    optimizer.max_grad_norm = 1.0
    assert optimizer.stats()["steps"] == 2
    optimizer.wake()
    optimizer.wake()
    assert optimizer.state_digests() == digests and str(optimizer.state_dict()) == str(state)
    optimizer.sleep()
    optimizer.sleep(folder if on_disk else None)
    optimizer.close()
    if on_disk:
        with pytest.raises(StateError, match="of a closed optimizer they are gone"):
            optimizer.state_digests()
    else:
        assert optimizer.state_digests() == digests
    for call in (optimizer.wake, optimizer.sleep):
        with pytest.raises(StateError, match="closed"):
            call()


def test_a_folder_that_cannot_take_the_state_changes_nothing(tmp_path: Path, trained: tuple[nn.Module, AdamW]) -> None:
    model, optimizer = trained
    (tmp_path / "file").touch()
    wrong: tuple[tuple[Any, str], ...] = (
        (tmp_path / "none", "No such file or directory; expected a folder to write to"),
        (tmp_path / "file", "expected a folder to write to"),
        ("", r"folder='': expected the path of a folder on a disk, or None"),
        (3.5, r"folder=3.5: expected the path of a folder on a disk, or None"),
        ("a\0b", r"folder='a\\x00b': expected the path of a folder on a disk, or None"),
    )
    for folder, words in wrong:
        with pytest.raises(ArgumentError, match=words):
            optimizer.sleep(folder)
    usage = SimpleNamespace(total=10**9, used=10**9 - 1000, free=1000)
    with (
        mock.patch.object(shutil, "disk_usage", return_value=usage),
        pytest.raises(ArgumentError, match=r"1e-06 GB are free there, and masters and moments have .* GB"),
    ):
        optimizer.sleep(tmp_path)
    assert os.listdir(tmp_path) == ["file"]
    batch(model, 0).backward()
    for place in (tmp_path, None):
        with pytest.raises(StateError, match=r"gradients of this step .* call step\(\) first, or zero_grad\(\)"):
            optimizer.sleep(place)
    optimizer.step()  # it is awake
    assert optimizer.stats()["steps"] == 3


NO_THREADS = mock.patch("threading.Thread.start", side_effect=RuntimeError("can't start new thread"))


def a_failing_disk(call: str, code: int = errno.EIO) -> Any:
    return mock.patch(f"superoffload.engine.state_file.os.{call}", side_effect=OSError(code, os.strerror(code)))


def test_a_write_that_fails_leaves_it_asleep_in_memory(tmp_path: Path, trained: tuple[nn.Module, AdamW]) -> None:
    model, optimizer = trained
    digests = optimizer.state_digests()
    full = [a_failing_disk(call, errno.ENOSPC) for call in ("pwrite", "fsync")]
    for failing, words in (*((one, "No space left.* asleep, and they are still in") for one in full), (NO_THREADS, "")):
        with failing, pytest.raises(StateError, match=rf"could not be written .*{words}"):
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
    no_memory: dict[str, Any] = {"side_effect": refused(1 << 30, "a test")}
    failures: list[tuple[Any, type[Exception], str]] = [
        (a_failing_disk("preadv"), StateError, "masters and moments in .* cannot be read: Input/output.* still asl"),
        (NO_THREADS, StateError, "cannot be read: can't start new thread.* call wake"),
        (mock.patch("superoffload.engine.placement.host_zeros", **no_memory), HostMemoryError, "to wake it free"),
        (mock.patch("superoffload.engine.layout.shared_journals", **no_memory), HostMemoryError, "still asleep"),
    ]
    for failing, error, words in failures:
        with failing, pytest.raises(error, match=words):
            optimizer.wake()
        with pytest.raises(StateError, match="asleep"):
            optimizer.step()
    optimizer.wake()
    assert optimizer.state_digests() == digests


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
