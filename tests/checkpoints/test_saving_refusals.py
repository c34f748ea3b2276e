"""Checkpoints in one process: refused by name when damaged, foreign or unsafe; file systems with limits."""

from __future__ import annotations

import errno
import io
import os
import pickle
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from superoffload import AdamW, CPUAdamW, checkpoints
from superoffload.checkpoints import folder as folders
from superoffload.checkpoints.tensor_files import TensorFile
from superoffload.errors import ArgumentError, DiskError, StateError
from tests.support.adamw_training import model_of
from tests.support.forged_checkpoints import with_state
from tests.support.over_stand_in import only_over_stand_in
from tests.support.saved_runs import TENSORS, Run, Tied, assert_same


def flip(path: Path, at: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 4
    path.write_bytes(bytes(data))


def replace(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 5)


def in_its_place(path: Path) -> None:
    """Another safetensors file of the same size."""
    size = path.stat().st_size
    with TensorFile(path.with_name("x"), {"a": (torch.uint8, (size - 128,))}, {}) as file:
        file.write("a", [torch.zeros(size - 128, dtype=torch.uint8)])
    os.replace(file.path, path)
    os.truncate(path, path.stat().st_size)


DAMAGE: dict[str, tuple[str, Callable[[Path], None]]] = {
    "truncated tensors": (TENSORS, truncate),
    "flipped bit in the header": (TENSORS, lambda path: flip(path, 0.02)),
    "flipped bit in a tensor": (TENSORS, lambda path: flip(path, 0.6)),
    "flipped last byte": (TENSORS, lambda path: flip(path, 1.0)),
    "another type in the header": (TENSORS, lambda path: replace(path, b'"F32"', b'"I32"')),
    "another file": (TENSORS, in_its_place),
    "tensors gone": (TENSORS, os.remove),
    "flipped bit in the state": ("state.pt", lambda path: flip(path, 0.5)),
    "truncated manifest": ("manifest.json", truncate),
    "another number in the manifest": ("manifest.json", lambda path: replace(path, b'"ranks":1', b'"ranks":2')),
    "manifest gone": ("manifest.json", os.remove),
}


def copy_of(folder: Path, target: Path) -> Path:
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


@pytest.mark.over_stand_in
@only_over_stand_in(damage=("flipped bit in a tensor",))
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused_by_name(damage: str, saved: Path, tmp_path: Path) -> None:
    name, harm = DAMAGE[damage]
    folder = copy_of(saved, tmp_path / "step-2")
    harm(folder / name)
    run = Run(3, torch.bfloat16)
    run.steps(range(1))
    before = run.everything()
    with pytest.raises(ArgumentError) as caught:
        checkpoints.load(folder, run.model, run.optimizer)
    assert name in str(caught.value) and str(folder) in str(caught.value)
    assert_same(run.everything(), before)
    run.optimizer.close()


def test_latest_passes_over_what_is_not_whole(saved: Path, tmp_path: Path) -> None:
    for step in (2, 10, 9):
        copy_of(saved, tmp_path / f"step-{step}")
    (tmp_path / "step-11").mkdir()
    copy_of(saved, tmp_path / ".writing-step-12-abc")
    truncate(copy_of(saved, tmp_path / "step-20") / TENSORS)
    truncate(copy_of(saved, tmp_path / "step-30") / "manifest.json")
    assert checkpoints.latest(tmp_path) == tmp_path / "step-10"
    nowhere = checkpoints.latest(tmp_path / "nowhere")
    assert nowhere is None
    with pytest.raises(ArgumentError, match=r"latest\(\) gives None"):
        checkpoints.load(nowhere, torch.nn.Linear(1, 1))  # type: ignore[arg-type]


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("/tmp/superoffload-must-not-exist",)


def test_code_in_a_checkpoint_does_not_run(saved: Path, run: Run, tmp_path: Path) -> None:
    """Refuses it even if manifest and checksums were made to fit; and is not saved."""
    folder = with_state(saved, tmp_path / "evil", pickle.dumps({"extra": Evil()}))
    with pytest.raises(ArgumentError, match="cannot be read safely"):
        checkpoints.load(folder, run.model, run.optimizer)
    assert not os.path.exists("/tmp/superoffload-must-not-exist")
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 3)  # it holds the optimizer; its state_dict() was meant
    for extra in ({"x": Evil()}, {"x": lambda: 0}, {"x": scheduler}, [1]):
        with pytest.raises(ArgumentError, match="extra"):
            checkpoints.save(tmp_path / "a", run.model, run.optimizer, extra=extra)  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == ["evil"]


def misfits() -> Iterator[tuple[nn.Module, Any, str]]:
    """Models and optimizers, and what is said of them."""
    model = model_of()
    yield model, AdamW(model.parameters(), threads=1), "the model lacks the extra state"
    run = Run(0, torch.bfloat16)
    run.model.norm.running_mean = torch.zeros(9, dtype=torch.bfloat16)
    yield run.model, run.optimizer, "norm.running_mean has shape (8,), expected (9,)"
    run = Run(0, torch.float32)
    yield run.model, run.optimizer, "expected torch.float32; convert the model"
    tied = Tied().bfloat16()
    yield tied, AdamW(tied.parameters(), threads=1), "2 param groups, the optimizer has 1"
    groups = [[tied.scale], [param for param in tied.parameters() if param is not tied.scale]]
    only = "only the checkpoint's has embedding.weight, empty, frozen.weight; only the optimizer's has scale"
    yield tied, AdamW([{"params": group} for group in groups], threads=1), only
    yield tied, CPUAdamW(tied.parameters()), "save its state_dict() and the model's with torch.save()"
    yield tied, torch.optim.SGD(tied.parameters()), "SGD, expected superoffload.AdamW or torch.optim.AdamW"
    yield tied, AdamW(model.parameters(), threads=1), "parameter 0 of group 0 is none of model's"


def test_what_does_not_fit_is_refused(saved: Path) -> None:
    for model, optimizer, words in misfits():
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(ArgumentError) as caught:
            checkpoints.load(saved, model, optimizer)
        assert words in str(caught.value)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        if isinstance(optimizer, AdamW):
            optimizer.close()


def test_bad_arguments(run: Run, tmp_path: Path) -> None:
    mine = run.model, run.optimizer
    checkpoints.save(tmp_path / "a", *mine)
    for keep in (0, True):
        with pytest.raises(ArgumentError, match=f"keep={keep}"):
            checkpoints.save(tmp_path / "b", *mine, keep=keep)
    with pytest.raises(ArgumentError, match="memory"):
        checkpoints.save_in_background(tmp_path / "b", *mine, memory=-1)
    with pytest.raises(ArgumentError, match="is none of model's"):
        checkpoints.save(tmp_path / "b", Tied(), run.optimizer)
    with pytest.raises(ArgumentError, match="exists already"):
        checkpoints.save(tmp_path / "a", *mine)
    assert os.listdir(tmp_path) == ["a"]


def test_state_of_torchs_adamw_that_has_no_place_in_a_checkpoint(tmp_path: Path) -> None:
    """The maxima of amsgrad, also in a checkpoint that another program wrote; what a program put there."""
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    one, other = torch.optim.AdamW(first.parameters()), torch.optim.AdamW(second.parameters())
    first(torch.ones(4, 3)).sum().backward()
    one.step()
    one.param_groups[0]["amsgrad"] = True
    with pytest.raises(ArgumentError, match="amsgrad=True, whose max_exp_avg_sq is not saved"):
        checkpoints.save(tmp_path / "a", first, one)
    one.param_groups[0]["amsgrad"] = False
    one.state[first.weight]["average"] = torch.zeros(())
    with pytest.raises(ArgumentError, match=r"its state of weight has average, for which a checkpoint"):
        checkpoints.save(tmp_path / "a", first, one)
    assert not list(tmp_path.iterdir())
    del one.state[first.weight]["average"]
    saved = checkpoints.save(tmp_path / "a", first, one)
    content, data = torch.load(saved / "state.pt", weights_only=True), io.BytesIO()
    content["groups"][0]["amsgrad"] = True
    torch.save(content, data)
    theirs = with_state(saved, tmp_path / "theirs", data.getvalue())
    for folder, whose in ((theirs, "the checkpoint's"), (saved, "the optimizer's")):
        other.param_groups[0]["amsgrad"] = whose == "the optimizer's"
        was = str((list(second.parameters()), other.state_dict()))
        with pytest.raises(ArgumentError, match=f"{whose} param group 0 has amsgrad=True"):
            checkpoints.load(folder, second, other)
        assert str((list(second.parameters()), other.state_dict())) == was
    checkpoints.load(saved, second)
    assert all(map(torch.equal, second.parameters(), first.parameters()))


# ---- file systems with limits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", ["EINVAL", "EBADF", "EACCES", "EIO"])
def test_folders_that_cannot_be_synced(
    error: str, tmp_path: Path, reader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EACCES: on opening; others: on fsync. A disk that fails is an error."""
    call, number = "open" if error == "EACCES" else "fsync", getattr(errno, error)
    real = getattr(os, call)

    def failing(what: Any, flags: int = 0, *rest: Any, **named: Any) -> Any:
        if stat.S_ISDIR(os.stat(what).st_mode) and not flags & os.O_DIRECTORY:
            raise OSError(number, os.strerror(number))
        return real(what, *((flags, *rest) if call == "open" else ()), **named)

    monkeypatch.setattr(os, call, failing)
    if error == "EIO":
        with pytest.raises(DiskError, match="not saved"):
            checkpoints.save(tmp_path / "step-1", *reader)
        return
    for step in (1, 2):
        checkpoints.save(tmp_path / "new" / f"step-{step}", *reader, keep=1)
    checkpoints.export_weights(tmp_path / "also" / "weights", *reader)
    assert checkpoints.latest(tmp_path / "new") == tmp_path / "new" / "step-2"
    checkpoints.load(tmp_path / "new" / "step-2", *reader)


def test_keep_says_when_it_removed_nothing(tmp_path: Path, reader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints.save(tmp_path / "step-1", *reader)
    with monkeypatch.context() as patch:
        finished = folders.finished
        patch.setattr(folders, "finished", lambda root: list(finished(root))[1:])
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
